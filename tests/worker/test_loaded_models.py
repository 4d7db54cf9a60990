"""How models are loaded, and which of several takes the next step."""

import gc
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_server.engine.messages import LoadModel, ModelLoaded, StepOutput
from mlx_server.requests import Tier
from mlx_server.worker import loaded_models
from mlx_server.worker.batch import Batch, StepResult
from mlx_server.worker.engine import Engine
from mlx_server.worker.weights import arrays
from tests.clocks import Clock
from tests.worker.engine_runs import ask, load, of, until

Turns = Callable[[int], list[str]]


@pytest.fixture
def clock() -> Clock:
    return Clock(tick=1e-6)


@pytest.fixture
def engine(tiny_path: Path, clock: Clock) -> Engine:
    engine = Engine(concurrency=4, clock=clock)
    load(engine, tiny_path)
    return engine


@pytest.fixture
def turns(engine: Engine, clock: Clock, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Whose turn each of the next steps is: "tiny" takes ten times as long as "second"."""
    load(engine, tiny_path, "second")
    step = Batch.step

    def timed(self: Batch, tier: Tier | None = None) -> StepResult:
        done = step(self, tier)
        clock.now += 0.1 if self is engine.models.batches["tiny"] else 0.01
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


def test_other_models_wait_for_a_piece_that_gives_a_token_and_for_no_step(
    engine: Engine, turns: Turns
) -> None:
    engine.handle(ask(0, tokens=1000, model="second"))
    turns(20)
    engine.handle(ask(1, tokens=9))
    other, waited = engine.models.batches["second"], list[bool]()
    while len(waited) < 4:
        if turns(1) == ["tiny"]:
            waited.append(other.waited_for_piece)
    assert waited == [True, False, False, False]


class Metal:
    """Takes the place of MLX in `loaded_models`, and records the limits that it is given."""

    def __init__(self, working_set: int) -> None:
        self.metal = self
        self.limits: list[int] = []
        self.active: list[int] = []
        """The bytes in memory when each limit was set."""
        self.refuses = False
        self.working_set = working_set

    def is_available(self) -> bool:
        return self.working_set > 0

    def device_info(self) -> dict[str, int]:
        return {"max_recommended_working_set_size": self.working_set}

    def clear_cache(self) -> None: ...

    def set_wired_limit(self, limit: int) -> None:
        if self.refuses:
            raise ValueError("the system is too old")
        self.limits.append(limit)
        self.active.append(mx.get_active_memory())


@pytest.fixture(scope="module")
def nbytes(tiny_path: Path) -> int:
    """Of the weights of the tiny model."""
    engine = Engine()
    load(engine, tiny_path)
    return sum(array.nbytes for array in arrays(engine.models.batches["tiny"].model))


def loaded(
    monkeypatch: pytest.MonkeyPatch, path: Path, working_set: float, *, refuses: bool = False
) -> tuple[Engine, Metal]:
    """Two models, one after the other."""
    metal, engine = Metal(int(working_set)), Engine(concurrency=4)
    metal.refuses = refuses
    monkeypatch.setattr(loaded_models, "mx", metal)
    assert of(ModelLoaded, load(engine, path, "first"))
    assert of(ModelLoaded, load(engine, path, "second"))
    return engine, metal


def test_weights_are_wired_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, tiny_path: Path, nbytes: int
) -> None:
    gc.collect()  # engines of other tests
    before = mx.get_active_memory()
    _, metal = loaded(monkeypatch, tiny_path, nbytes / 0.6)
    assert metal.limits == [nbytes]
    assert metal.active[0] < before + nbytes / 2


def test_those_of_all_models_count(
    monkeypatch: pytest.MonkeyPatch, tiny_path: Path, nbytes: int
) -> None:
    engine, metal = loaded(monkeypatch, tiny_path, 2 * nbytes / 0.8)
    assert metal.limits == [2 * nbytes], "the first alone is too small to be worth it"
    engine.handle(ask(0, tokens=60, model="first"))
    engine.step()
    metal.working_set = int(3 * nbytes / 0.8)
    load(engine, tiny_path, "third")
    assert metal.limits == [2 * nbytes], "it never changes while a row is under way"


def test_a_system_that_refuses_is_reported_and_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
    tiny_path: Path,
    nbytes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded(monkeypatch, tiny_path, nbytes / 0.6, refuses=True)
    assert "the weights can't be wired: the system is too old" in caplog.text


def test_a_model_is_loaded_when_its_vocabulary_is_read(
    engine: Engine, tiny_path: Path, demo_path: Path
) -> None:
    """Whoever reads it holds the GIL, so that the first request would wait for it."""
    engine.handle(LoadModel("second", str(tiny_path), [2], tokenizer=str(demo_path)))
    until(engine, lambda reports: bool(of(ModelLoaded, reports)))
    engine.handle(ask(0, model="second", grammar='start: "x"', stop_tokens=[2]))
    assert engine.doing == "compiling a grammar"
