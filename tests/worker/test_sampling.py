"""One step's choice for a whole batch, against plain numpy for one row at a time."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_server.engine.messages import Generate, Logprobs
from mlx_server.requests import SamplingParams
from mlx_server.worker.row import Row
from mlx_server.worker.sampling import Sampled, Sampler, narrow, places_of_largest

Numbers = NDArray[Any]

WIDTH = 48
GREEDY = SamplingParams(temperature=0)


def a_row(sampling: SamplingParams, prompt: Sequence[int] = (), *, width: int = WIDTH) -> Row:
    return Row(Generate(0, "m", list(prompt), 9, [], sampling), width)


def random_logits(rows: int, *, seed: int = 0, width: int = WIDTH) -> Numbers:
    return np.random.default_rng(seed).normal(0, 3, (rows, width)).astype(np.float32)


def sampled(rows: Sequence[Row], logits: Numbers, inputs: Sequence[int] | None = None) -> Sampled:
    return Sampler(rows)(mx.array(logits), mx.array(list(inputs or [0] * len(rows))))


def chosen(rows: Sequence[Row], logits: Numbers, inputs: Sequence[int] | None = None) -> list[int]:
    return [int(token) for token in np.array(sampled(rows, logits, inputs).tokens)]


def drawn(count: int, sampling: SamplingParams, logits: Numbers) -> list[int]:
    """`count` draws of one row, made as so many rows of one batch."""
    rows = [a_row(sampling, width=len(logits)) for _ in range(count)]
    for number, row in enumerate(rows):
        row.sampled = number
    return chosen(rows, np.tile(logits, (count, 1)))


def softmax(scores: Numbers) -> Numbers:
    return np.asarray(np.exp(log_softmax(scores)))


def log_softmax(scores: Numbers) -> Numbers:
    exact = scores.astype(np.float64) - scores.max()
    return np.asarray(exact - np.log(np.exp(exact).sum()))


def kept(scores: Numbers, top_k: int, top_p: float) -> Numbers:
    """Which scores stay, as the definitions of top_k and top_p say it."""
    best = np.argsort(-scores, kind="stable")[:top_k]
    mass = softmax(scores[best])
    reached = np.cumsum(mass) - mass
    return np.asarray(scores >= scores[best[reached < top_p]].min())


def penalised(
    logits: Numbers, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams
) -> Numbers:
    scores = logits.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *answer}:
        repeated = sampling.repetition_penalty
        scores[token] = scores[token] / repeated if scores[token] > 0 else scores[token] * repeated
    for token, count in Counter(answer).items():
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return scores


def distance(tokens: Sequence[int], expected: Numbers) -> float:
    """Total variation: the share of draws that went to the wrong token."""
    found = np.bincount(tokens, minlength=len(expected)) / len(tokens)
    return float(np.abs(found - expected).sum() / 2)


def narrowed(scores: Numbers, top_k: int, top_p: float) -> Numbers:
    one_row = narrow(mx.array(scores[None]), mx.array([[float(top_k)]]), mx.array([[top_p]]))
    return np.array(one_row[0])


@given(
    scores=st.lists(st.integers(-80, 80), min_size=1, max_size=40),
    top_k=st.integers(1, 50),
    top_p=st.floats(0.001, 0.999),
)
def test_narrow_keeps_what_the_definitions_keep(
    scores: list[int], top_k: int, top_p: float
) -> None:
    values = np.array(scores, np.float32) / 10  # coarse, so that ties are frequent
    result = narrowed(values, top_k, top_p)
    stayed = np.isfinite(result)
    # Sums of float32 fall on one side or the other of a top_p that they meet exactly.
    assert np.all(stayed >= kept(values, top_k, top_p - 1e-5))
    assert np.all(stayed <= kept(values, top_k, top_p + 1e-5))
    assert np.array_equal(result[stayed], values[stayed])


def test_a_row_is_narrowed_next_to_others_as_it_is_alone() -> None:
    """Next to rows with a small top_k, a large one or none."""
    limits = [(20, 0.9), (0, 0.9), (1000, 1.0), (256, 0.99), (257, 0.5), (0, 1.0)]
    logits = random_logits(len(limits), width=3000)
    params = [SamplingParams(temperature=2, seed=5, top_k=k, top_p=p) for k, p in limits]
    together = chosen([a_row(each, width=3000) for each in params], logits)
    alone = [
        chosen([a_row(each, width=3000)], row[None])
        for each, row in zip(params, logits, strict=True)
    ]
    assert [[token] for token in together] == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), lambda s: softmax(s)),
        (SamplingParams(temperature=0.6), lambda s: softmax(s / 0.6)),
        (SamplingParams(temperature=2.0), lambda s: softmax(s / 2)),
        (SamplingParams(top_k=3), lambda s: softmax(np.where(kept(s, 3, 1), s, -np.inf))),
        (SamplingParams(top_p=0.8), lambda s: softmax(np.where(kept(s, 99, 0.8), s, -np.inf))),
        (SamplingParams(top_p=0), lambda s: softmax(np.where(kept(s, 1, 1), s, -np.inf))),
        (
            SamplingParams(temperature=2.0, top_k=6, top_p=0.7),
            lambda s: softmax(np.where(kept(s / 2, 6, 0.7), s / 2, -np.inf)),
        ),
        (
            SamplingParams(min_p=0.2),
            lambda s: softmax(np.where(softmax(s) >= 0.2 * softmax(s).max(), s, -np.inf)),
        ),
        (
            SamplingParams(temperature=2.0, min_p=0.3),
            lambda s: softmax(np.where(softmax(s / 2) >= 0.3 * softmax(s / 2).max(), s / 2, -1e9)),
        ),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "no top_p", "both", "min_p", "hot min_p"],
)
def test_draws_follow_the_distribution(sampling: SamplingParams, expected: Any) -> None:
    logits = np.array([2.0, 1.5, 1.0, 0.6, 0.2, -0.3, -1.0, -3.0], np.float32)
    tokens = [
        token
        for seed in range(4)
        for token in drawn(5000, SamplingParams(**{**_asdict(sampling), "seed": seed}), logits)
    ]
    wanted = expected(logits)
    assert distance(tokens, wanted) < 0.015
    assert wanted[tokens].min() > 0


def _asdict(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in SamplingParams.__slots__}


def test_one_draw_says_nothing_of_the_next() -> None:
    logits = np.zeros(4, np.float32)
    tokens = drawn(20_000, SamplingParams(seed=1), logits)
    pairs = [4 * a + b for a, b in pairwise(tokens)]
    assert distance(pairs, np.full(16, 1 / 16)) < 0.02


def test_unseeded_rows_draw_each_on_its_own() -> None:
    rows = [a_row(SamplingParams()) for _ in range(64)]
    assert len(set(chosen(rows, np.zeros((64, WIDTH), np.float32)))) > 16


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-39, 5e-324])
def test_a_temperature_of_zero_or_next_to_it_takes_the_likeliest(temperature: float) -> None:
    logits = random_logits(8)
    rows = [a_row(SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1))] * 8
    assert chosen(rows, logits) == logits.argmax(axis=-1).tolist()


MIXED = [
    SamplingParams(seed=7),
    SamplingParams(seed=-1, temperature=1.7, top_k=9),
    SamplingParams(seed=2**63 - 1, top_p=0.8, logprobs=3),
    SamplingParams(seed=-(2**63), min_p=0.05, presence_penalty=1.0),
    GREEDY,
    SamplingParams(seed=2**63 + 5, logit_bias={3: 2.0, 5: -100.0}, repetition_penalty=1.3),
]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0], [2, 0], [3, 5]])
def test_a_row_draws_the_same_in_any_company(order: list[int]) -> None:
    logits = random_logits(len(MIXED))

    def run(members: list[int]) -> list[list[int]]:
        rows = [a_row(MIXED[i], prompt=[1, 2, i]) for i in members]
        tokens, inputs = [], members
        for step in range(6):
            inputs = chosen(rows, np.roll(logits[members], step, axis=-1), inputs)
            tokens.append(inputs)
        return [list(row) for row in zip(*tokens, strict=True)]

    assert run(order) == [run([i])[0] for i in order]


def test_seeds_differ_in_all_their_64_bits_and_their_sign() -> None:
    seeds = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 2**63]
    flat = np.zeros((8, 4096), np.float32)
    answers = []
    for seed in seeds:
        rows = [a_row(SamplingParams(seed=seed), width=4096) for _ in range(8)]
        for number, row in enumerate(rows):
            row.sampled = number
        answers.append(tuple(chosen(rows, flat)))
        assert len(set(answers[-1])) > 1  # each draw is another
    # -2**63 and 2**63 are the same 64 bits
    assert len(set(answers)) == len(seeds) - 1


def test_masked_tokens_are_never_chosen() -> None:
    logits = random_logits(200, seed=3)
    masked = np.random.default_rng(4).random(logits.shape) < 0.9
    masked[:, 7] = False
    logits[masked] = -np.inf
    logits[:, 7] = -20.0  # allowed, and unlikely
    bias = dict.fromkeys(range(0, WIDTH, 2), 100.0)
    kinds = [
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=40, top_p=0.99),
        SamplingParams(min_p=0.01, logit_bias=bias),
        SamplingParams(repetition_penalty=0.5, presence_penalty=-2.0, frequency_penalty=-2.0),
        SamplingParams(temperature=0, logit_bias=bias),
    ]
    rows = [a_row(kinds[i % len(kinds)], prompt=range(WIDTH)) for i in range(200)]
    sampler, inputs = Sampler(rows), mx.array([7] * 200)
    for _ in range(3):
        inputs = sampler(mx.array(logits), inputs).tokens
        assert not masked[range(200), np.array(inputs)].any()


def test_the_only_token_allowed_is_chosen_whatever_its_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One uniform in four billion is zero, and its Gumbel noise minus infinity."""
    monkeypatch.setattr(mx.random, "gumbel", lambda shape, key: mx.full(shape, -math.inf))
    logits = np.full((1, WIDTH), -np.inf, np.float32)
    logits[0, 5] = 1.0
    assert chosen([a_row(SamplingParams())], logits) == [5]


PENALTIES = [
    SamplingParams(temperature=0, repetition_penalty=1.5),
    GREEDY,
    SamplingParams(temperature=0, presence_penalty=0.8),
    SamplingParams(temperature=0, frequency_penalty=0.5),
    SamplingParams(
        temperature=0,
        repetition_penalty=0.8,
        presence_penalty=-0.4,
        frequency_penalty=0.3,
        logit_bias={4: 1.5, 9: -2.0},
    ),
    SamplingParams(temperature=0, logit_bias={8: 0.7}),
]


@pytest.mark.parametrize("regroup", [False, True], ids=["one batch", "rows leave and return"])
def test_penalties_against_numpy(regroup: bool) -> None:
    close_calls = np.random.default_rng(1).normal(0, 1, (40, 12)).astype(np.float32)
    close_calls[::2] -= 5  # a repetition penalty turns on the sign
    prompts = [[1, 2, 2], [3], [0, 4], [5, 5, 5], [1, 9], [7]]
    rows = [a_row(s, p, width=12) for s, p in zip(PENALTIES, prompts, strict=True)]
    answers: list[list[int]] = [[] for _ in rows]
    sampler = Sampler(rows)
    members = list(range(len(rows)))
    for step, logits in enumerate(close_calls):
        if regroup:
            members = [i for i in range(len(rows)) if (step + i) % 3]
            sampler = Sampler([rows[i] for i in members])
        inputs = [(answers[i] or prompts[i])[-1] for i in members]
        tokens = sampler(mx.array(np.tile(logits, (len(members), 1))), mx.array(inputs)).tokens
        for i, token in zip(members, np.array(tokens), strict=True):
            expected = penalised(logits, prompts[i], answers[i], PENALTIES[i])
            assert token == expected.argmax(), (step, i)
            answers[i].append(int(token))


def reported(rows: Sequence[Row], logits: Numbers) -> list[Logprobs | None]:
    return [entry() if entry else None for entry in sampled(rows, logits).logprobs]


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
