"""What a step of the engine costs next to hostile rows, whatever else the machine does: processor
time, side by side with plain rows, and the steps that a stream gets while a slow grammar's rows sit
them out. For the event loop see test_loop.py.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.engine.messages import Generate
from mlx_server.http.security import CLIENT_HEADER
from mlx_server.requests import SamplingParams
from mlx_server.worker.row import Row
from mlx_server.worker.sampling import Sampler
from tests.hostile.test_loop import TRIES
from tests.live.server import LiveServer, serving
from tests.tiny import ENDOFTEXT, IM_END

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


AMBIGUOUS = 'start: s\ns: "a" | s s | s s s\n'
"""Each further letter takes its masks longer: milliseconds after ten, and then seconds."""
STREAMED = 60
STEPS = 3
"""The neighbour's tokens for each of a slow row, at least: next to rows that are waited for it is
one."""


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    config = {"models": {"tiny": {"source": str(tiny_path), "preload": True}}}
    with serving(tmp_path_factory.mktemp("neighbour"), config) as server:
        yield server


def streamed(server: LiveServer, client: str, **asked: Any) -> Iterator[tuple[int, str]]:
    """The number of the answer and the text of each delta."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with (
        server.http() as http,
        http.stream(
            "POST",
            "/v1/chat/completions",
            json={**body, **asked},
            headers={CLIENT_HEADER: client},
            timeout=120,
        ) as response,
    ):
        for line in response.iter_lines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                if text := choice["delta"].get("content"):
                    yield choice["index"], text


def test_a_stream_goes_on_while_slow_rows_sit_steps_out(server: LiveServer) -> None:
    written, slow, over = [0] * 15, Event(), Event()

    def attack() -> None:
        endless = {"logit_bias": {str(IM_END): -100, str(ENDOFTEXT): -100}, "max_tokens": 400}
        asked = {"n": 15, "structured_outputs": {"grammar": AMBIGUOUS}, **endless}
        for answer, text in streamed(server, "attacker", **asked):
            written[answer] += len(text)
            if min(written) >= 16:
                slow.set()
            if over.is_set():
                return

    with ThreadPoolExecutor(1) as thread:
        attacking = thread.submit(attack)
        try:
            assert slow.wait(60)
            plain = {"guided_regex": f"b{{{STREAMED}}}", "max_tokens": STREAMED, "temperature": 0}
            text, before = "", -1
            for _, piece in streamed(server, "neighbour", **plain):
                before = sum(written) if before < 0 else before
                text += piece
            taken = (sum(written) - before) / len(written)
        finally:
            over.set()
        attacking.result(60)
    assert text == "b" * STREAMED
    assert taken * STEPS <= STREAMED, written
