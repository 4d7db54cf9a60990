"""Rows that wait, are scored, and join their batch."""

from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.messages import Admitted, Prefilled, PromptLogprobs, StepOutput
from mlx_server.requests import SamplingParams
from mlx_server.worker import rows
from mlx_server.worker.batch import Batch
from mlx_server.worker.engine import Engine
from mlx_server.worker.rows import PIECE, Scoring
from tests.worker.batch_runs import ids
from tests.worker.engine_runs import ask, failures, load, of, run, tokens_of


@pytest.mark.parametrize("prompt", [1, 2, 3 * PIECE])
def test_a_row_may_be_scored_only(engine: Engine, prompt: int) -> None:
    reports = run(engine, ask(0, prompt=prompt, tokens=0, prompt_logprobs=True))
    assert reports[0] == Admitted(0)
    (scored,) = of(PromptLogprobs, reports)
    assert len(scored.logprobs) == prompt - 1
    assert tokens_of(0, reports) == []
    assert of(StepOutput, reports)[-1].waiting == 0
    assert engine.pause is None


@pytest.mark.parametrize("prompt", [1, 6, 2 * PIECE + 1])
def test_a_scored_row_goes_on_as_one_that_is_not(engine: Engine, prompt: int) -> None:
    sampling = SamplingParams(temperature=0, logprobs=2)
    reports = run(
        engine,
        ask(0, prompt=prompt, sampling=sampling, prompt_logprobs=True),
        ask(1, prompt=prompt, sampling=sampling),
    )
    (scored,) = of(PromptLogprobs, reports)
    assert {len(entry.top) for entry in scored.logprobs} <= {2}
    assert ids(tokens_of(0, reports)) == ids(tokens_of(1, reports))
    assert Prefilled(0, 0) in reports  # scored it was, but not known from before
    first = next(i for i, r in enumerate(reports) if tokens_of(0, [r]))
    assert reports.index(scored) < first


def test_prompts_are_scored_one_after_the_other(engine: Engine) -> None:
    """Each holds a cache while it is scored, and takes its time from the rows that decode."""
    for row in (0, 1, 2):
        engine.handle(ask(row, prompt=2 * PIECE + 1, tokens=0, prompt_logprobs=True))
    steps = [[scored.row for scored in of(PromptLogprobs, engine.step())] for _ in range(9)]
    assert steps == [[], [], [0], [], [], [1], [], [], [2]]


def test_scoring_leaves_the_rows_that_decode_their_steps(engine: Engine) -> None:
    engine.handle(ask(0, tokens=50))
    for _ in range(3):
        engine.step()
    engine.handle(ask(1, prompt=3 * PIECE, tokens=0, prompt_logprobs=True))
    assert len(tokens_of(0, engine.step() + engine.step())) == 2
    assert engine.pause == 0


def test_a_scoring_that_fails_fails_alone(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Scoring:
        yield
        raise MemoryError("no room")

    engine.handle(ask(0))
    monkeypatch.setattr(rows, "prompt_logprobs", fails)
    reports = run(engine, ask(1, prompt_logprobs=True))
    assert failures(reports) == {1: "MemoryError: no room"}
    assert ids(tokens_of(0, reports)) == answer


def test_a_scored_row_that_can_not_go_on_fails_alone(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Batch, *_: Any) -> None:
        raise MemoryError("no room")

    engine.handle(ask(0))
    monkeypatch.setattr(Batch, "add", fails)
    reports = run(engine, ask(1, prompt=3 * PIECE, prompt_logprobs=True))
    assert failures(reports) == {1: "MemoryError: no room"}
    assert ids(tokens_of(0, reports)) == answer


def test_clients_take_turns_with_their_scorings(tiny_path: Path) -> None:
    """One that comes later waits for a piece of each other client's, and not for their ends."""
    engine = Engine()
    load(engine, tiny_path)
    long: dict[str, Any] = {"prompt": 8 * PIECE, "tokens": 0, "prompt_logprobs": True}
    scorings = [
        ask(0, client="many", **long),
        ask(1, client="many", **long),
        ask(2, client="late", **{**long, "prompt": 2 * PIECE}),
    ]
    ended = [report.row for report in of(PromptLogprobs, run(engine, *scorings))]
    assert ended == [2, 0, 1]
