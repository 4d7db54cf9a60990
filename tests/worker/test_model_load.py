"""On a Mac the weights of a load are wired: once, before they are read, and nothing else."""

import gc
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_server.engine.messages import ModelLoaded
from mlx_server.worker import loaded_models
from mlx_server.worker.engine import Engine
from mlx_server.worker.weights import arrays
from tests.worker.engine_runs import ask, load, of


class Metal:
    """Takes the place of MLX in `model_load`, and records the limits that it is given."""

    def __init__(self, working_set: int) -> None:
        self.metal = self
        self.limits: list[int] = []
        self.active: list[int] = []
        """The bytes in memory when each limit was set."""
        self.refuses = False
        self._working_set = working_set

    def is_available(self) -> bool:
        return self._working_set > 0

    def device_info(self) -> dict[str, int]:
        return {"max_recommended_working_set_size": self._working_set}

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
    return sum(array.nbytes for array in arrays(engine._batches["tiny"].model))


def loaded(
    monkeypatch: pytest.MonkeyPatch, path: Path, working_set: float, *, refuses: bool = False
) -> tuple[Engine, Metal]:
    """Two models, one after the other."""
    metal, engine = Metal(int(working_set)), Engine(concurrency=4, wired="auto")
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
    engine._loads._wired._wired = 3 * nbytes
    load(engine, tiny_path, "third")
    assert metal.limits == [2 * nbytes], "it never changes while a row is under way"


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_where_there_is_no_metal_or_much_memory_nothing_is_wired(
    monkeypatch: pytest.MonkeyPatch, tiny_path: Path, nbytes: int, share: float
) -> None:
    _, metal = loaded(monkeypatch, tiny_path, nbytes / share if share else 0)
    assert metal.limits == []


def test_a_system_that_refuses_is_reported_and_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
    tiny_path: Path,
    nbytes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded(monkeypatch, tiny_path, nbytes / 0.6, refuses=True)
    assert "the weights can't be wired: the system is too old" in caplog.text
