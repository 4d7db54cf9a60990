"""A poisoned row among seven others: it ends alone, with a word on why, and they never notice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.engine.messages import (
    AdapterLoaded,
    CancelRows,
    Generate,
    LoadAdapter,
    Prefilled,
    Report,
    RowFailed,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker.constrained_decoding.logit_constraints import (
    LogitConstraint,
    LogitConstraints,
)
from mlx_server.worker.engine import Engine
from mlx_server.worker.row import Row
from mlx_server.worker.sampling import NOT_NUMBERS, Sampled, Sampler
from tests.tiny import ENDOFTEXT, IM_END
from tests.worker.batch_runs import ids
from tests.worker.constrained_decoding.grammars import HEAD, loaded
from tests.worker.engine_runs import ask, drain, failures, grammar_of, of, tokens_of, until
from tests.worker.lora_files import contents, mlx_adapter, save

TOKENS = 20
STEPS = [0, 1, 17]
POISONED = 3
WORDS = HEAD + "start: /[a-z ]+/\n"

NEIGHBOURS = {
    0: "",
    1: "grammar seed logprobs penalties",
    2: "grammar seed logprobs adapter",
    4: "grammar seed penalties adapter",
    5: "grammar logprobs adapter",
    6: "seed penalties adapter",
    7: "logprobs penalties adapter",
}
"""Any two of these things are met together, apart, and not at all."""


def neighbour(row: int, things: str) -> Generate:
    # no row may end before it was seen what happens to it
    sampling = SamplingParams(temperature=0, logit_bias={ENDOFTEXT: -100, IM_END: -100})
    if "seed" in things:
        sampling = replace(sampling, temperature=1.0, top_p=0.9, seed=row)
    if "logprobs" in things:
        sampling = replace(sampling, logprobs=2)
    if "penalties" in things:
        sampling = replace(sampling, repetition_penalty=1.2, frequency_penalty=-1.0)
    asked = ask(row, prompt=5 + row, tokens=TOKENS, sampling=sampling)
    asked.grammar = grammar_of(WORDS if "grammar" in things else None)
    asked.adapter = "good" if "adapter" in things else None
    return asked


def poisoned() -> Generate:
    """As it is when nothing is wrong with it: of all things, one."""
    asked = neighbour(POISONED, "grammar seed logprobs penalties adapter")
    asked.grammar = grammar_of(f"{WORDS}// poisoned\n")
    return asked


def test_the_neighbours_are_of_every_kind() -> None:
    for two in combinations(("grammar", "seed", "logprobs", "penalties", "adapter"), 2):
        met = {tuple(thing in things for thing in two) for things in NEIGHBOURS.values()}
        assert met == {*product([False, True], repeat=2)}


@pytest.fixture(scope="module")
def adapters(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    good = mlx_adapter(root / "good", tiny_path)
    config, tensors = contents(good)
    overflows = {name: array * 1e30 for name, array in tensors.items()}
    broken = {name: array * float("nan") for name, array in tensors.items()}
    return {
        "good": good,
        "overflows": save(root / "overflows", config, overflows),
        "nan": save(root / "nan", config, broken),
    }


@pytest.fixture(scope="module")
def engine(tiny_path: Path, adapters: dict[str, Path]) -> Engine:
    made = loaded(tiny_path)
    (report,) = made.handle(LoadAdapter("tiny", "good", str(adapters["good"])))
    assert isinstance(report, AdapterLoaded)
    return made


def begin(engine: Engine, *asked: Generate) -> list[Report]:
    return [report for each in asked for report in engine.handle(each)]


def neighbours() -> list[Generate]:
    return [neighbour(*each) for each in NEIGHBOURS.items()]


def assert_unmoved(reports: list[Report], unharmed: list[Report]) -> None:
    for row in NEIGHBOURS:
        found, wanted = tokens_of(row, reports), tokens_of(row, unharmed)
        assert ids(found) == ids(wanted)
        assert len(found) == TOKENS
        for token, expected in zip(found, wanted, strict=True):
            assert (token.logprobs is None) == (expected.logprobs is None)
            if token.logprobs and expected.logprobs:
                assert token.logprobs.chosen == pytest.approx(expected.logprobs.chosen, abs=1e-3)


@pytest.fixture(scope="module")
def unharmed(engine: Engine) -> list[Report]:
    """The run with a harmless neighbour."""
    reports = begin(engine, *neighbours(), poisoned()) + drain(engine)
    assert not failures(reports)
    assert len(tokens_of(POISONED, reports)) == TOKENS
    return reports


Patch = Callable[[pytest.MonkeyPatch, int], None]


@dataclass(frozen=True)
class Poison:
    """What is done to the row when it has so many tokens, and what is then said of it."""

    patch: Patch
    said: str
    lost: int = 0
    """Tokens: a grammar is asked for the next one before the previous one is reported."""


def logits_of(value: float) -> Patch:
    def patch(patched: pytest.MonkeyPatch, step: int) -> None:
        def spoilt(self: Sampler, logits: mx.array, inputs: mx.array, *rest: Any) -> Sampled:
            for at, row in enumerate(self.rows):
                if row.number == POISONED and row.sampled == step:
                    logits = mx.array(logits)
                    logits[at, 7] = value
            return sample(self, logits, inputs, *rest)

        sample = Sampler.__call__
        patched.setattr(Sampler, "__call__", spoilt)

    return patch


def sampler_raises(patched: pytest.MonkeyPatch, step: int) -> None:
    def key(self: Row) -> tuple[int, int]:
        if self.number == POISONED and self.sampled == step:
            raise ZeroDivisionError("no luck")
        return draw(self)

    draw = Row.key
    patched.setattr(Row, "key", key)


class Poisoned(LogitConstraint):
    """Errs at some step of its row."""

    at = 0

    def step(self, token: int | None, words: Any) -> bool:
        self.count = getattr(self, "count", -1) + 1
        if self.count == self.at and self._matcher:
            assert not self._matcher.consume_token(300)  # it errs, and does not raise
        return super().step(token, words)


def matcher_errs(patched: pytest.MonkeyPatch, step: int) -> None:
    def guide(self: LogitConstraints, asked: Generate) -> LogitConstraint | None:
        made = make(self, asked)
        if made and asked.row == POISONED:
            made.__class__, Poisoned.at = Poisoned, step
        return made

    make = LogitConstraints.constraint
    patched.setattr(LogitConstraints, "constraint", guide)


POISONS = {
    "NaN among its logits": Poison(logits_of(float("nan")), NOT_NUMBERS),
    "infinity among its logits": Poison(logits_of(float("inf")), NOT_NUMBERS),
    "the sampler raises": Poison(sampler_raises, "could not be chosen: ZeroDivisionError: no luck"),
    "the grammar errs": Poison(matcher_errs, "grammar could not be followed", lost=1),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_a_row_that_goes_wrong_ends_alone(
    engine: Engine,
    unharmed: list[Report],
    monkeypatch: pytest.MonkeyPatch,
    poison: Poison,
    step: int,
) -> None:
    poison.patch(monkeypatch, step)
    reports = begin(engine, *neighbours(), poisoned()) + drain(engine)
    assert_unmoved(reports, unharmed)
    (failed,) = of(RowFailed, reports)
    assert failed.row == POISONED
    assert poison.said in failed.message
    reported = ids(tokens_of(POISONED, unharmed))[: max(0, step - poison.lost)]
    assert ids(tokens_of(POISONED, reports)) == reported


def with_neighbours(engine: Engine, step: int, *asked: Generate) -> list[Report]:
    """Until each of them has so many tokens."""
    rows = [*NEIGHBOURS, *(each.row for each in asked)]
    reports = begin(engine, *neighbours(), *asked)
    return reports + until(
        engine, lambda found: all(len(tokens_of(row, found)) >= step for row in rows)
    )


@pytest.mark.parametrize("step", STEPS)
def test_a_row_that_is_cancelled_ends_alone(
    engine: Engine, unharmed: list[Report], step: int
) -> None:
    reports = with_neighbours(engine, step, poisoned())
    reports += engine.handle(CancelRows([POISONED])) + drain(engine)
    assert_unmoved(reports, unharmed)
    assert not failures(reports)
    reported = tokens_of(POISONED, reports)
    assert step <= len(reported) < TOKENS
    assert ids(reported) == ids(tokens_of(POISONED, unharmed))[: len(reported)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("adapter", "said"), [("overflows", NOT_NUMBERS), ("nan", "adapter nan is not loaded")]
)
def test_a_row_whose_adapter_has_no_finite_numbers_ends_alone(
    engine: Engine,
    unharmed: list[Report],
    adapters: dict[str, Path],
    adapter: str,
    said: str,
    step: int,
) -> None:
    reports = with_neighbours(engine, step)
    (answer,) = engine.handle(LoadAdapter("tiny", adapter, str(adapters[adapter])))
    assert isinstance(answer, AdapterLoaded) or "not finite" in str(answer)
    asked = poisoned()
    asked.adapter = adapter
    reports += begin(engine, asked) + drain(engine)
    assert_unmoved(reports, unharmed)
    assert said in failures(reports)[POISONED]
    assert tokens_of(POISONED, reports) == []


def test_what_a_poisoned_row_computed_is_not_known_to_the_next(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(tiny_path, cache_bytes=1 << 24)
    plain = ask(POISONED, prompt=40)
    known = [begin(engine, plain) + drain(engine) for _ in range(2)]
    assert [of(Prefilled, each)[0].cached_tokens > 0 for each in known] == [False, True]
    with monkeypatch.context() as patched:
        logits_of(float("nan"))(patched, 1)
        assert failures(begin(engine, plain) + drain(engine)) == {POISONED: NOT_NUMBERS}
    again = begin(engine, plain) + drain(engine)
    assert of(Prefilled, again)[0].cached_tokens == 0
    assert ids(tokens_of(POISONED, again)) == ids(tokens_of(POISONED, known[0]))
