"""A prompt's own log probabilities, and going on from the cache that they leave."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.engine.messages import Generate, Logprobs
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch
from mlx_server.worker.rows import PIECE, prompt_logprobs
from tests.worker.batch_runs import a_prompt

LENGTHS = [1, 2, 3, PIECE - 1, PIECE, PIECE + 1, PIECE + 2, 2 * PIECE + 1, 3 * PIECE - 20]


def scored(model: Any, prompt: list[int], top: int) -> tuple[list[Logprobs], list[Any], int]:
    """What `score` returns, and in how many pieces it got there."""
    scoring = prompt_logprobs(model, prompt, top)
    pieces = 0
    while True:
        try:
            next(scoring)
        except StopIteration as end:
            return *end.value, pieces
        pieces += 1


@pytest.mark.parametrize("length", LENGTHS)
def test_the_log_probabilities_are_those_of_one_full_pass(tiny_model: Any, length: int) -> None:
    prompt = a_prompt(length)
    found, _, pieces = scored(tiny_model, prompt, top=3)
    assert pieces == -(-(length - 1) // PIECE)

    logits = tiny_model(mx.array([prompt]))[0]
    exact = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for entry, row, token in zip(found, exact[:-1], prompt[1:], strict=True):
        assert entry.chosen == pytest.approx(row[token], abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(
            sorted(row.tolist(), reverse=True)[:3], abs=1e-3
        )
        assert [row[id] for id, _ in entry.top] == pytest.approx(
            [value for _, value in entry.top], abs=1e-3
        )


def test_without_alternatives_each_token_still_has_its_own(tiny_model: Any) -> None:
    prompt = a_prompt(PIECE + 10)
    bare, _, _ = scored(tiny_model, prompt, top=0)
    full, _, _ = scored(tiny_model, prompt, top=4)
    assert [entry.chosen for entry in bare] == [entry.chosen for entry in full]
    assert all(entry.top == [] for entry in bare)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=3, repetition_penalty=1.4, frequency_penalty=0.3),
    ],
    ids=["greedy", "penalised"],
)
def test_its_cache_goes_on_as_the_prompt_would(
    tiny_model: Any, length: int, sampling: SamplingParams
) -> None:
    prompt = a_prompt(length)
    _, cache, _ = scored(tiny_model, prompt, top=0)
    batch = Batch(tiny_model, concurrency=4)
    batch.add(Generate(0, "m", prompt, 10, [], sampling), cache)
    batch.add(Generate(1, "m", prompt, 10, [], sampling))
    answers: dict[int, list[int]] = {0: [], 1: []}
    while batch:
        for token in batch.step().tokens:
            answers[token.row].append(token.id)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 10
