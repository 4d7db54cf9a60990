"""A model's files are read and loaded once for all requests, and again after a failure."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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

    monkeypatch.setattr("mlx_server.pool.preparation.prepare", counted)

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


def test_a_model_that_is_not_measured_is_refused_and_measured_again(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: Any) -> KvCost:
        raise ModelUnusable("Model 'a' can't be loaded: no layers")

    async def test() -> None:
        async with running(a) as (pool, machine):
            with monkeypatch.context() as patched:
                patched.setattr(Engine, "kv_cost", failing)
                errors = await results(*(asking(pool) for _ in range(3)))
            assert {str(error) for error in errors} == {"Model 'a' can't be loaded: no layers"}
            assert (view(pool).error, machine.log) == ("Model 'a' can't be loaded: no layers", [])
            assert (await held(pool)).prepared.kv is BYTES
            assert view(pool).error is None

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
                patched.setattr("mlx_server.pool.preparation.prepare", broken)
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
