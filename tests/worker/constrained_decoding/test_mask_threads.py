"""Masks that take too long for a step: their rows sit steps out, and answer as they do alone."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_server import limits
from mlx_server.engine.messages import (
    CancelRows,
    Generate,
    LoadModel,
    PreemptRows,
    Report,
    ResumeRows,
    Token,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker.constrained_decoding.mask_threads import (
    LEAST_SECONDS,
    MOST_SECONDS,
    MaskHistory,
    MaskThreads,
    SlowMask,
)
from mlx_server.worker.engine import Engine
from mlx_server.worker.prefill import schedule
from tests.clocks import Clock
from tests.worker.batch_runs import ids
from tests.worker.constrained_decoding.grammars import ENDS, GRAMMARS, loaded
from tests.worker.engine_runs import ask, drain, failures, run, tokens_of, until


@dataclass(eq=False)
class Row:
    """A row whose masks take as long as it says, by the clock."""

    clock: Clock
    client: str = "a"
    seconds: float = 0.0
    gate: Event | None = None
    """A mask that is made in a thread waits for it."""
    lexer: object = None
    history: MaskHistory = field(default_factory=MaskHistory)
    failure: str = ""
    error: BaseException | None = None
    made: int = 0

    def __post_init__(self) -> None:
        self.lexer = self.lexer or self

    def step(self, token: int | None, bitmask: NDArray[np.uint32]) -> bool:
        if self.gate:
            assert self.gate.wait(20)
        if self.error:
            raise self.error
        self.made += 1
        self.clock.now += self.seconds
        return True

    def fail(self, failure: str) -> None:
        self.failure = failure


class Steps:
    """Steps of rows: which have their masks."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.threads = MaskThreads(lambda: None, self.clock, lambda task: task.done())
        self.begun: list[SlowMask] = []
        self.threads.begin_step({"a"})

    def row(self, client: str = "a", **rest: Any) -> Row:
        return Row(self.clock, client, **rest)

    def step(self, *rows: Row) -> list[Row]:
        """Returns the rows whose masks fit. The masks of the others are begun."""
        self.clock.now += 2 * LEAST_SECONDS
        self.threads.begin_step({row.client for row in rows} or {"a"})
        fitting = [row for row in rows if self.fits(row)]
        self.begun += [self.threads.make_later(row, 0, 1) for row in rows if row not in fitting]
        return fitting

    def fits(self, row: Row) -> bool:
        if not self.threads.fits(row):
            return False
        self.threads.make(row, 0, np.zeros(1, np.uint32))
        return True

    def end(self, slow: SlowMask) -> None:
        assert slow.task
        slow.task.exception(20)
        self.threads.collect()


def test_masks_of_a_step_share_its_time() -> None:
    steps = Steps()
    rows = [steps.row(seconds=0.3 * LEAST_SECONDS) for _ in range(8)]
    assert steps.step(*rows) == rows[:4]  # the fourth is begun within the time, and exceeds it
    assert steps.step(*rows) == []  # which the next step pays
    assert steps.step(*rows)


def test_a_client_has_its_part_of_a_step_whatever_others_do() -> None:
    steps = Steps()
    many = [steps.row("many", seconds=LEAST_SECONDS) for _ in range(15)]
    one = steps.row("one", seconds=LEAST_SECONDS / 4)
    for _ in range(5):
        assert one in steps.step(*many, one)
        for slow in list(steps.begun):
            if slow.task:
                steps.end(slow)
    assert len([slow for slow in steps.begun if slow.is_made]) >= 5


def test_a_client_has_one_thread_at_a_time_and_all_have_two() -> None:
    steps = Steps()
    gate = Event()
    rows = [steps.row(client, gate=gate) for client in "aabbc"]
    for row in rows:
        row.history.add(1.0, LEAST_SECONDS)
    rows[1].history.seconds = 0.5  # the quicker one of a client is not behind the slower
    assert steps.step(*rows) == []
    begun = [slow.task is not None for slow in steps.begun]
    assert begun == [True, False, True, False, False]
    assert begun.count(True) == limits.MASK_THREADS
    gate.set()
    steps.end(steps.begun[0])
    assert [slow.task is not None for slow in steps.begun].count(True) >= 3
    for slow in [*steps.begun, *steps.begun]:
        if slow.task:
            steps.end(slow)
    assert all(slow.restricts for slow in steps.begun)


def test_a_mask_that_never_ends_fails_its_row_and_no_other_of_its_client() -> None:
    steps = Steps()
    gate = Event()
    rows = [steps.row(gate=gate), steps.row(), steps.row("b")]
    for row in rows:
        row.history.add(1.0, LEAST_SECONDS)
    steps.step(*rows)
    due = steps.threads.pause
    assert due is not None
    assert due <= limits.GRAMMAR_TOKEN_SECONDS
    steps.clock.now += due + 0.1
    steps.threads.collect()
    assert "Make it simpler" in rows[0].failure
    assert steps.begun[0].restricts is False
    gate.set()
    for slow in steps.begun:
        steps.end(slow)
    assert [bool(row.failure) for row in rows] == [True, False, False]
    assert steps.threads.pause is None


SAMPLINGS = [
    SamplingParams(temperature=1, seed=7),
    SamplingParams(temperature=0.7, seed=1, top_p=0.9, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0, presence_penalty=0.5, logit_bias={40: 2.0}, logprobs=0),
    SamplingParams(temperature=1, seed=3),
]


def rows() -> list[Generate]:
    """Rows with a grammar each, of two clients, and rows without one."""
    grammars = [*GRAMMARS, GRAMMARS[1], None, None]
    return [
        ask(
            number,
            prompt=4 + 3 * number,
            tokens=9 + number,
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            grammar=grammar,
            client="ab"[number % 2],
        )
        for number, grammar in enumerate(grammars)
    ]


@pytest.fixture
def answers(tiny_path: Path) -> list[list[Token]]:
    """Those of the rows alone, whose masks are all made at once."""
    engine = loaded(tiny_path)
    return [tokens_of(row.row, run(engine, row)) for row in rows()]


@pytest.fixture
def late(tiny_path: Path) -> Callable[[int], Engine]:
    """Makes an engine where no mask is made in time, and each a different number of steps later."""

    def made(concurrency: int) -> Engine:
        looks = WeakKeyDictionary[Future[Any], int]()
        clock, turns = Clock(), count()

        def is_done(task: Future[Any]) -> bool:
            looks[task] = looks.get(task, next(turns) % 4) - 1
            if looks[task] < 0:
                wait([task])
            return looks[task] < 0

        engine = Engine(concurrency=concurrency, clock=clock, is_done=is_done)
        engine.handle(LoadModel("tiny", str(tiny_path), ENDS))
        drain(engine)
        for row in rows():  # the grammars are compiled before the clock goes fast
            run(engine, replace_row(row, row.row + 100))
        clock.tick = 4 * MOST_SECONDS
        return engine

    return made


def replace_row(command: Generate, row: int) -> Generate:
    changed = Generate(**{name: getattr(command, name) for name in command.__struct_fields__})
    changed.row = row
    return changed


def assert_as_alone(reports: list[Report], answers: list[list[Token]], but: int = -1) -> None:
    assert failures(reports) == {}
    for number, expected in enumerate(answers):
        if number != but:
            answer = tokens_of(number, reports)
            assert ids(answer) == ids(expected), number
            assert [t.finish for t in answer] == [t.finish for t in expected]
            for token, wanted in zip(answer, expected, strict=True):
                assert (token.logprobs is None) == (wanted.logprobs is None)
                if token.logprobs and wanted.logprobs:
                    assert token.logprobs.chosen == pytest.approx(wanted.logprobs.chosen, abs=1e-3)


def test_rows_that_sit_steps_out_answer_as_alone(
    late: Callable[[int], Engine], answers: list[list[Token]]
) -> None:
    engine = late(8)
    reports = run(engine, *rows())
    assert_as_alone(reports, answers)
    free = max(at for at, report in enumerate(reports) if tokens_of(4, [report]))
    slow = max(at for at, report in enumerate(reports) if tokens_of(0, [report]))
    assert free < slow  # though it has more tokens: it did not wait for the others
    assert engine.pause is None


def test_a_long_row_that_sat_out_and_was_preempted_goes_on_with_its_own_token(
    tiny_path: Path, late: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get a token before it joins them, so that it joins at the beginning of a step."""
    monkeypatch.setattr(schedule, "MOST", 2 * schedule.LEAST)
    long = ask(20, prompt=4 * schedule.LEAST, tokens=5, sampling=SAMPLINGS[1])
    long.grammar = rows()[1].grammar
    other = ask(21, tokens=40)
    alone = ids(tokens_of(20, run(loaded(tiny_path), long)))
    engine = late(8)
    reports = engine.handle(long)
    reports += until(engine, lambda found: len(tokens_of(20, found)) == 2)
    engine.handle(PreemptRows([20]))
    reports += engine.handle(other)
    reports += until(engine, lambda found: len(tokens_of(21, found)) == 2)
    engine.handle(ResumeRows([20]))
    assert ids(tokens_of(20, reports + drain(engine))) == alone


@pytest.mark.parametrize("gone", [0, 3])
def test_a_row_that_leaves_while_it_sits_out_changes_no_other(
    late: Callable[[int], Engine], answers: list[list[Token]], gone: int
) -> None:
    engine = late(8)
    reports = [report for row in rows() for report in engine.handle(row)]
    reports += until(engine, lambda found: len(tokens_of(gone, found)) == 2)
    engine.handle(CancelRows([gone]))
    reports += drain(engine)
    assert_as_alone(reports, answers, but=gone)
    assert len(tokens_of(gone, reports)) == 2
    assert engine.pause is None


def test_a_row_keeps_its_place_while_it_sits_out(late: Callable[[int], Engine]) -> None:
    """Otherwise rows that wait for a place would begin in its place, and it would wait for them."""
    first, second = rows()[1], rows()[4]
    reports = run(late(1), first, second)
    last = max(at for at, report in enumerate(reports) if tokens_of(1, [report]))
    assert len(tokens_of(1, reports)) == first.max_tokens
    assert len(tokens_of(4, reports)) == second.max_tokens
    assert all(at > last for at, report in enumerate(reports) if tokens_of(4, [report]))


def test_others_take_the_places_of_a_client_whose_rows_all_sit_out(
    late: Callable[[int], Engine],
) -> None:
    """And not the client itself: it would wait for its own rows."""
    slow, newcomer = rows()[1], replace_row(rows()[4], 4)
    more = [replace_row(slow, 10 + n) for n in range(2)]
    own = replace_row(newcomer, 5)
    newcomer.client, own.client = "c", slow.client
    reports = run(late(2), *more, own, newcomer)
    ends = {row: last_of(row, reports) for row in (4, 5, 10, 11)}
    assert ends[4] < min(ends[10], ends[11]) < ends[5]


def last_of(row: int, reports: list[Report]) -> int:
    return max(at for at, report in enumerate(reports) if tokens_of(row, [report]))
