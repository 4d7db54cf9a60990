"""What a step of the engine costs next to hostile rows, whatever else the machine does: processor
time, side by side with plain rows. A slow grammar's rows sit steps out, see
tests/worker/constrained_decoding/test_mask_threads.py; for the event loop see test_loop.py and
test_large_answers.py.
"""

import time
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.engine.messages import Generate
from mlx_server.requests import SamplingParams
from mlx_server.worker.row import Row
from mlx_server.worker.sampling import Sampler
from tests.hostile.test_loop import TRIES

pytestmark = pytest.mark.alone

ROWS, WIDTH = 15, 50_000
MOST_TIMES = 4.5
"""What a step of hostile rows may cost more than one of plain rows: it was 7 with a sort by MLX."""

HOSTILE: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.99},
    "a large top_k": {"top_k": 3000},
    "penalties": {
        "frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.1,
    },
    "log probabilities": {"logprobs": 20},
    "biases": {"logit_bias": {str(id): 0.5 for id in range(4096)}},
}  # fmt: skip


def step_seconds(**params: Any) -> float:
    """The processor time of a step of so many rows, the least of some."""
    if biases := params.get("logit_bias"):
        params = {**params, "logit_bias": {int(id): bias for id, bias in biases.items()}}
    rows = [
        Row(
            Generate(
                number, "m", [1], 9, [], SamplingParams(temperature=1.0, seed=number, **params)
            ),
            WIDTH,
        )
        for number in range(ROWS)
    ]
    sampler, dice = Sampler(rows), np.random.default_rng(3)
    logits = mx.array(dice.normal(size=(ROWS, WIDTH)).astype(np.float32))
    inputs = mx.array([1] * ROWS)
    mx.eval(logits, inputs)
    taken = []
    for _ in range(5):
        began = time.process_time()
        sampled = sampler(logits, inputs)
        mx.eval(*sampled.pending)
        taken.append(time.process_time() - began)
        inputs = sampled.tokens
    return min(taken)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_step_next_to_hostile_rows_costs_few_plain_ones(name: str) -> None:
    ratios = []
    for _ in range(TRIES):
        ratios.append(step_seconds(**HOSTILE[name]) / step_seconds())
        if ratios[-1] < MOST_TIMES:
            break
    assert min(ratios) < MOST_TIMES, ratios
