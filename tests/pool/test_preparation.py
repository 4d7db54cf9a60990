"""A model's files are read and loaded once for all requests, and again after a failure."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_server.checkpoints.checkpoint import read_checkpoint
from mlx_server.engine.kv_cost import KvCost
from mlx_server.engine.messages import ModelLoading
from mlx_server.errors import ModelUnusable, ServerError
from mlx_server.pool import prepare as preparing
from mlx_server.pool.prepare import ModelSpec
from tests.families import byte_level, write_checkpoint
from tests.pool.machine import (
    BYTES,
    Engine,
    asking,
    cancelled,
    held,
    results,
    run,
    running,
    state,
    turns,
    view,
)


def test_its_files_are_read_once_for_all_who_want_it(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    prepare = preparing.prepare

    def counted(spec: ModelSpec, *rest: Any, **more: Any) -> Any:
        reads.append(spec.id)
        return prepare(spec, *rest, **more)

    monkeypatch.setattr("mlx_server.pool.models.prepare", counted)

    async def test() -> None:
        async with running(a) as (pool, _):
            first, *others = await asyncio.gather(*(pool.prepared("a") for _ in range(20)))
            assert all(other is first for other in others)
            assert await pool.prepared("default") is first
            assert reads == ["a"]

    run(test)


@pytest.mark.usefixtures("sizes")
def test_files_that_are_repaired_are_read_again(tmp_path: Path) -> None:
    async def test() -> None:
        write_checkpoint(tmp_path, byte_level(), config={"model_type": "gpt2"})
        async with running(ModelSpec("a", str(tmp_path))) as (pool, _):
            with pytest.raises(ModelUnusable, match="safetensors"):
                await held(pool)
            assert "safetensors" in (view(pool).error or "")
            assert (state(pool), view(pool).progress) == ("unloaded", None)
            (tmp_path / "model.safetensors").touch()
            assert (await held(pool)).prepared.id == "a"
            assert view(pool).error is None

    run(test)


@pytest.fixture
def own(a: ModelSpec, tmp_path: Path) -> ModelSpec:
    """A model whose files a test may change."""
    return replace(a, source=str(shutil.copytree(a.source, tmp_path / "own")))


def test_a_model_that_is_not_measured_is_measured_again_when_its_files_change(
    own: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def failing(engine: Engine, model: str, *_: Any) -> KvCost:
        asked.append(model)
        raise ModelUnusable("Model 'a' can't be loaded: no layers")

    async def test() -> None:
        async with running(own) as (pool, machine):
            with monkeypatch.context() as patched:
                patched.setattr(Engine, "kv_cost", failing)
                errors = await results(*(asking(pool) for _ in range(3)))
                errors += [*await results(asking(pool)), *await results(asking(pool))]
            errors += await results(asking(pool))
            assert {str(error) for error in errors} == {"Model 'a' can't be loaded: no layers"}
            assert (view(pool).error, machine.log) == ("Model 'a' can't be loaded: no layers", [])
            assert asked == ["a"]
            (Path(own.source) / "config.json").touch()
            assert (await held(pool)).prepared.kv is BYTES
            assert view(pool).error is None

    run(test)


def test_files_that_are_unusable_are_not_read_again(
    own: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config of 9,999 layers has the engine make them all."""
    file, read = Path(own.source) / "config.json", list[Path]()

    def counted(folder: Path, *rest: Any) -> Any:
        read.append(folder)
        return read_checkpoint(folder, *rest)

    monkeypatch.setattr("mlx_server.pool.prepare.read_checkpoint", counted)
    whole = file.read_text()

    async def test() -> None:
        async with running(own) as (pool, _):
            file.write_text(json.dumps({**json.loads(whole), "num_hidden_layers": 9_999}))
            errors = [*await results(asking(pool)), *await results(asking(pool), asking(pool))]
            assert all("num_hidden_layers is 9999" in str(error) for error in errors)
            assert len(read) == 1
            file.write_text(whole)
            await held(pool)

    run(test)


@pytest.mark.parametrize("of_files", [True, False])
def test_a_load_that_fails_is_tried_again_unless_its_files_are_to_blame(
    own: ModelSpec, of_files: bool
) -> None:
    async def test() -> None:
        async with running(own) as (pool, machine):
            machine.broken, machine.blames_files = {"a"}, of_files
            for _ in range(3):
                (error,) = await results(asking(pool))
                assert str(error) == "Model 'a' can't be loaded: no room"
            assert len(machine.log) == (1 if of_files else 3)
            machine.broken = set()
            (Path(own.source) / "config.json").touch()
            await held(pool)

    run(test)


def test_an_unknown_family_is_told_before_anything_is_loaded(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, family="llama")) as (pool, machine):
            with pytest.raises(ServerError, match="Known families"):
                await held(pool)
            assert machine.log == []

    run(test)


def test_what_nobody_expected_of_the_files_is_an_error_and_no_end(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with running(a) as (pool, _):
            with monkeypatch.context() as patched:
                patched.setattr("mlx_server.pool.models.prepare", broken)
                errors = await results(*(asking(pool) for _ in range(3)))
            assert {type(error) for error in errors} == {ServerError}
            assert not any("secret" in str(error) for error in errors)
            await held(pool)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    run(test)
    assert "ZeroDivisionError: secret" in caplog.text


def test_progress_is_told_by_model(a: ModelSpec) -> None:
    async def test() -> None:
        seen: list[tuple[str, str, int, int]] = []
        async with running(a, on_progress=lambda *progress: seen.append(progress), silent=True) as (
            pool,
            machine,
        ):
            task = asking(pool)
            await machine.asked("load a")
            machine.engines[-1]._dispatch(ModelLoading("a", 5, 10))
            assert seen == [("a", "loading", 5, 10)]
            progress = view(pool).progress
            assert progress
            assert (progress.what, progress.done, progress.total) == ("loading", 5, 10)
            machine.speak()
            await task
            assert view(pool).progress is None

    run(test)


def test_whoever_leaves_while_the_files_are_read_leaves_nothing_behind(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with running(a) as (pool, _):
            impatient, patient = asking(pool), asking(pool)
            await turns(3)
            assert (state(pool), pool.rows) == ("preparing", 2)
            await cancelled(impatient)
            assert pool.rows == 1
            await patient

    run(test)
