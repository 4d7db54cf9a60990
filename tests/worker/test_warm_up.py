"""A load takes the first steps, so that no request has to."""

from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.messages import (
    LoadModel,
    ModelLoaded,
    ModelLoading,
    Prefilled,
    Report,
    StepOutput,
)
from mlx_server.worker import loaded_models as module
from mlx_server.worker.batch import Batch
from mlx_server.worker.engine import Engine
from mlx_server.worker.loaded_models import ROWS, warm_up
from tests.worker.engine_runs import ask, load, of, run, tokens_of


@pytest.fixture(autouse=True)
def _as_with_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IS_WARM_UP_USEFUL", True)


class Watched(Batch):
    """Notes the shapes of what its model is called with."""

    def __init__(self, model: Any, concurrency: int = 8) -> None:
        self.shapes: list[tuple[int, int]] = []

        def noted(inputs: Any, **options: Any) -> Any:
            self.shapes.append(tuple(inputs.shape))
            return model(inputs, **options)

        noted.make_cache = getattr(model, "make_cache", None)  # type: ignore[attr-defined]
        for name in ("layers", "modules", "named_modules", "parameters"):
            setattr(noted, name, getattr(model, name))
        super().__init__(noted, concurrency=concurrency)


def test_it_prefills_decodes_one_row_and_several(tiny_model: Any) -> None:
    batch = Watched(tiny_model)
    steps = sum(1 for _ in warm_up(batch, 8))
    rows = {rows for rows, tokens in batch.shapes if tokens == 1}
    assert {1, ROWS} <= rows
    assert any(tokens >= 16 for _, tokens in batch.shapes)
    assert not batch
    assert batch.warm
    assert steps < 40


def test_a_model_that_can_not_be_warmed_up_is_loaded_all_the_same(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(batch: Batch) -> Any:
        raise ValueError("no merge")

    with monkeypatch.context() as broken:
        broken.setattr(Batch, "step", fails)
        engine = Engine(concurrency=4)
        assert of(ModelLoaded, load(engine, tiny_path))
    assert len(tokens_of(0, run(engine, ask(0)))) == 5


def test_nothing_of_it_is_reported_kept_or_changes_an_answer(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(concurrency=4, cache_bytes=1 << 30)
    reports = load(engine, tiny_path)
    assert {type(report) for report in reports} == {ModelLoading, ModelLoaded}
    assert engine.prompts.memory.nbytes == 0
    assert engine.warm
    assert not any(engine.models.batches.values())
    answered = run(engine, ask(0, prompt=40))
    assert of(Prefilled, answered) == [Prefilled(0, 0)]
    with monkeypatch.context() as cold:
        cold.setattr(module, "_steps", lambda batch, rows: iter(()))
        other = Engine(concurrency=4)
        load(other, tiny_path)
    assert tokens_of(0, run(other, ask(0, prompt=40))) == tokens_of(0, answered)


def test_other_models_decode_meanwhile(tiny_path: Path) -> None:
    engine = Engine(concurrency=4)
    load(engine, tiny_path)
    engine.handle(ask(0, tokens=500))
    for _ in range(5):
        engine.step()
    load_second: list[Report] = []

    engine.handle(LoadModel("second", str(tiny_path)))
    warming = []
    while not of(ModelLoaded, load_second):
        load_second = engine.step()
        if engine.doing.startswith("warming"):
            warming.append(sum(len(step.tokens) for step in of(StepOutput, load_second)))
    assert len(warming) > 5
    assert all(warming)
