"""Log probabilities are the model's own, with each row's alternatives."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.engine.messages import Logprobs
from mlx_server.requests import SamplingParams
from mlx_server.worker.row import Row
from mlx_server.worker.sampling import Sampler, places_of_largest
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


@pytest.mark.parametrize("width", [20, 21, 1279, 1280, 1281, 1344, 1345, 5000])
@pytest.mark.parametrize("count", [1, 2, 19, 20])
def test_the_places_are_those_of_a_stable_sort(width: int, count: int) -> None:
    """Also where values tie, in one chunk or in several, and where most tokens are excluded."""
    plain = random_logits(3, width=width)
    kinds = {
        "different": plain,
        "coarse": np.round(plain),
        "equal": np.zeros_like(plain),
        "excluded": np.where(plain < 6, -np.inf, plain).astype(np.float32),
        "falling": -np.sort(plain, axis=-1)[:, ::-1].copy(),
    }
    for kind, values in kinds.items():
        found = np.sort(np.array(places_of_largest(mx.array(values), count)), axis=-1)
        exact = np.sort(np.argsort(-values, axis=-1, kind="stable")[:, :count], axis=-1)
        assert np.array_equal(found, exact), kind


@pytest.mark.parametrize("width", [1281, 1344, 5000])
def test_invalid_logits_have_no_places_beyond_the_vocabulary(width: int) -> None:
    values = np.full((2, width), np.nan, np.float32)
    values[1, 3] = 1
    assert np.array(places_of_largest(mx.array(values), 20)).max() < width


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0, logprobs=20), SamplingParams(top_k=20, top_p=0.9)],
    ids=["log probabilities", "top_k"],
)
def test_a_few_tokens_are_found_without_ordering_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    width, ordered = 32_000, list[int]()
    for name in ("argpartition", "argsort", "partition", "sort", "topk"):
        monkeypatch.setattr(mx, name, counting(getattr(mx, name), ordered))
    sampled([a_row(sampling, width=width)], random_logits(1, width=width))
    assert 0 < sum(ordered) < width / 8


def counting(order: Callable[..., mx.array], ordered: list[int]) -> Callable[..., mx.array]:
    def counted(values: mx.array, *args: Any, **named: Any) -> mx.array:
        ordered.append(values.size)
        return order(values, *args, **named)

    return counted


def test_half_precision_logits_are_reported_in_full_precision() -> None:
    logits = mx.array(random_logits(1)).astype(mx.bfloat16)
    step = Sampler([a_row(SamplingParams(temperature=0, logprobs=1))])(logits, mx.array([0]))
    (entry,) = step.logprobs
    assert entry is not None
    exact = log_softmax(np.array(logits.astype(mx.float32))[0])
    assert entry.read().chosen == pytest.approx(exact.max(), abs=1e-5)
