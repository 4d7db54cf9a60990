"""Which of several models takes the next step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_server.engine.messages import CancelRows, StepOutput
from mlx_server.worker.batch import Batch, StepResult
from mlx_server.worker.engine import Engine
from tests.worker.engine_runs import Clock, ask, load, of, run_by

Turns = Callable[[int], list[str]]


@pytest.fixture
def turns(engine: Engine, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Whose turn each of the next steps is: "tiny" takes ten times as long as "second"."""
    load(engine, tiny_path, "second")
    clock, step = Clock(), Batch.step
    run_by(clock, engine)

    def timed(self: Batch) -> StepResult:
        done = step(self)
        clock.now += 0.1 if self is engine._batches["tiny"] else 0.01
        return done

    monkeypatch.setattr(Batch, "step", timed)
    return lambda steps: [of(StepOutput, engine.step())[-1].model for _ in range(steps)]


def test_models_get_the_same_time_and_none_starves(engine: Engine, turns: Turns) -> None:
    engine.handle(ask(0, tokens=1000))
    engine.handle(ask(1, tokens=1000, model="second"))
    turns(30)  # before the second model's prompt the first one has had two turns
    seen = turns(110)
    assert 9 <= seen.count("tiny") <= 11
    gaps = "".join("t" if model == "tiny" else "s" for model in seen).split("t")
    assert max(map(len, gaps)) <= 11


@pytest.mark.parametrize("late", ["tiny", "second"])
def test_a_model_that_rested_gets_no_credit_for_it(engine: Engine, turns: Turns, late: str) -> None:
    early = {"tiny": "second", "second": "tiny"}[late]
    engine.handle(ask(0, tokens=1000, model=early))
    assert set(turns(200)) == {early}
    engine.handle(ask(1, tokens=1000, model=late))
    assert set(turns(15)) == {"tiny", "second"}


def test_a_model_that_worked_while_others_rested_owes_them_nothing(
    engine: Engine, turns: Turns
) -> None:
    engine.handle(ask(0, tokens=1000))
    turns(200)
    engine.handle(CancelRows([0]))
    engine.handle(ask(1, tokens=1000, model="second"))
    turns(5)
    engine.handle(ask(2, tokens=1000))
    assert "tiny" in turns(15)


def test_requests_that_end_at_once_do_not_starve_another_model(
    engine: Engine, turns: Turns
) -> None:
    """Each of them begins after a rest, however short."""
    engine.handle(ask(0, tokens=1000, model="second"))
    seen: list[str] = []
    for row in range(1, 20):
        engine.handle(ask(row, tokens=1))
        seen += turns(2)
    assert seen.count("second") > 30
