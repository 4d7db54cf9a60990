"""Log probabilities are the model's own, with each row's alternatives."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.engine.messages import Logprobs
from mlx_server.requests import SamplingParams
from mlx_server.worker.row import Row
from mlx_server.worker.sampling import Sampler
from tests.worker.test_sampling import Numbers, a_row, log_softmax, random_logits, sampled


def reported(rows: Sequence[Row], logits: Numbers) -> list[Logprobs | None]:
    return [entry.read() if entry else None for entry in sampled(rows, logits).logprobs]


def test_logprobs_are_the_models_own() -> None:
    """Before bias, penalties and temperature, for the chosen token and for the likeliest."""
    sampling = SamplingParams(
        temperature=0, logit_bias={6: 100.0}, repetition_penalty=2.0, logprobs=5
    )
    logits = random_logits(1)
    (found,) = reported([a_row(sampling, [6, 7])], logits)
    assert found is not None
    exact = log_softmax(logits[0])
    assert found.chosen == pytest.approx(exact[6], abs=1e-4)
    best = np.argsort(-exact)[:5]
    assert [token for token, _ in found.top] == best.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(exact[best].tolist(), abs=1e-4)


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    asked = [3, None, 0, 20, None, 1]
    logits = random_logits(len(asked))
    rows = [a_row(SamplingParams(temperature=0, logprobs=count)) for count in asked]
    found = reported(rows, logits)
    assert [None if entry is None else len(entry.top) for entry in found] == asked
    for row, entry in zip(logits, found, strict=True):
        if entry is not None:
            assert entry.chosen == pytest.approx(log_softmax(row).max(), abs=1e-4)
            best = np.argsort(-row)[: len(entry.top)]
            assert [token for token, _ in entry.top] == best.tolist()


def test_no_row_gets_more_alternatives_than_there_are_tokens() -> None:
    (found,) = reported([a_row(SamplingParams(logprobs=20), width=5)], random_logits(1, width=5))
    assert found is not None
    assert sorted(token for token, _ in found.top) == [0, 1, 2, 3, 4]


def test_alternatives_that_tie_are_in_the_order_of_their_ids() -> None:
    logits = np.array([[0, 2, 1, 2, 1, 2, 0, 1]], np.float32)
    (found,) = reported([a_row(SamplingParams(temperature=0, logprobs=6), width=8)], logits)
    assert found is not None
    assert [token for token, _ in found.top] == [1, 3, 5, 2, 4, 7]


def test_half_precision_logits_are_reported_in_full_precision() -> None:
    logits = mx.array(random_logits(1)).astype(mx.bfloat16)
    step = Sampler([a_row(SamplingParams(temperature=0, logprobs=1))])(logits, mx.array([0]))
    (entry,) = step.logprobs
    assert entry is not None
    exact = log_softmax(np.array(logits.astype(mx.float32))[0])
    assert entry.read().chosen == pytest.approx(exact.max(), abs=1e-5)
