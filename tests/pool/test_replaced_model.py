"""A model's folder that is replaced while the server runs is read wholly anew, or not at all."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_server.errors import EngineDied, ModelReplaced, ModelUnusable, NotEnoughMemory
from mlx_server.models.checkpoint import read_checkpoint
from mlx_server.pool import prepare as preparing
from mlx_server.pool.prepare import ModelSpec
from mlx_server.pool.readmission import Attempts
from tests.families import byte_level, write_checkpoint
from tests.pool.machine import TWO, WEIGHTS, Holding, asks, held, running, state

pytestmark = pytest.mark.anyio

OLD, NEW = 100, 200
"""Contexts, by which the checkpoints differ."""


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is as large as its file."""
    monkeypatch.setattr(
        preparing, "weights_bytes", lambda path, _: (path / "model.safetensors").stat().st_size
    )


def checkpoint(folder: Path, context: int, size: int = WEIGHTS) -> Path:
    config = {"model_type": "llama", "max_position_embeddings": context}
    made = write_checkpoint(folder, byte_level(), config=config)
    (made / "model.safetensors").write_bytes(bytes(size))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "m", OLD)


@pytest.fixture
def a(folder: Path) -> ModelSpec:
    return ModelSpec("a", str(folder))


@pytest.fixture
def b(tmp_path: Path) -> ModelSpec:
    return ModelSpec("b", str(checkpoint(tmp_path / "other", OLD)))


def replaced(folder: Path, size: int = WEIGHTS) -> None:
    shutil.rmtree(folder)
    checkpoint(folder, NEW, size)


async def test_what_is_in_memory_stays_as_it_is_and_the_next_load_is_wholly_new(
    a: ModelSpec, b: ModelSpec, folder: Path
) -> None:
    async with running(a, b, limits=replace(TWO, budget=100)) as (pool, machine):
        first = (await held(pool)).prepared
        replaced(folder)
        assert (await held(pool)).prepared is first
        await held(pool, "b")
        assert state(pool) == "unloaded"
        assert (await held(pool)).prepared.context_length == NEW
        await held(pool, "b")
        again = (await held(pool)).prepared
        assert again is (await pool.prepared("a")), "nothing was replaced: nothing is read"
        assert machine.log.count("load a") == 3


async def test_a_larger_model_is_measured_before_it_is_loaded(a: ModelSpec, folder: Path) -> None:
    async with running(a) as (pool, machine):
        await pool.prepared("a")
        replaced(folder, 500)
        with pytest.raises(NotEnoughMemory):
            await held(pool)
        assert machine.log == []


async def test_tokens_of_the_old_tokenizer_never_meet_the_new_weights(
    a: ModelSpec, folder: Path
) -> None:
    async with running(a) as (pool, machine):
        planned = await pool.prepared("a")
        replaced(folder)
        with pytest.raises(ModelReplaced):
            async with pool.lease(planned, asks(0)):
                raise AssertionError
        assert machine.log == [], "nothing of it was loaded"
        async with Holding(pool):
            assert machine.log == ["load a"]
            with pytest.raises(ModelReplaced):
                async with pool.lease(planned, asks(0)):
                    raise AssertionError


async def test_a_row_whose_engine_is_lost_meets_no_other_weights(
    a: ModelSpec, folder: Path
) -> None:
    async with running(a) as (pool, machine):
        planned, attempts = await pool.prepared("a"), Attempts("a", lambda: "")

        async def begin() -> None:
            async with pool.visit(attempts, planned, asks(0)):
                replaced(folder)
                machine.kill()
                raise EngineDied("The engine process died.")

        await begin()
        with pytest.raises(ModelReplaced):
            await begin()
        assert machine.log == ["load a"]


async def test_files_that_are_replaced_while_they_load(a: ModelSpec, folder: Path) -> None:
    async with running(a, silent=True) as (pool, machine):
        asking = asyncio.create_task(held(pool))
        await machine.asked("load a")
        replaced(folder)
        machine.speak()
        with pytest.raises(ModelReplaced):
            await asking
        assert machine.log == ["load a", "unload a"]
        assert (await held(pool)).prepared.context_length == NEW


async def test_files_that_are_replaced_while_they_are_read(
    a: ModelSpec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_checkpoint

    def meanwhile(*args: Any) -> Any:
        found = read(*args)
        monkeypatch.setattr(preparing, "read_checkpoint", read)
        replaced(folder)
        return found

    monkeypatch.setattr(preparing, "read_checkpoint", meanwhile)

    async with running(a) as (pool, machine):
        with pytest.raises(ModelReplaced):
            await held(pool)
        assert machine.log == []
        assert (await held(pool)).prepared.context_length == NEW


async def test_a_folder_that_is_half_replaced(a: ModelSpec, folder: Path) -> None:
    async with running(a) as (pool, machine):
        await pool.prepared("a")
        (folder / "config.json").write_text("{")
        for _ in range(2):
            with pytest.raises(ModelUnusable, match=r"config\.json"):
                await held(pool)
        (folder / "config.json").unlink()
        with pytest.raises(ModelUnusable, match=r"lacks config\.json"):
            await held(pool)
        replaced(folder)
        assert (await held(pool)).prepared.context_length == NEW
        assert machine.log == ["load a"]


async def test_adapters_that_clients_loaded_outlive_the_files(a: ModelSpec, folder: Path) -> None:
    async with running(a) as (pool, _):
        first = (await pool.prepared("a")).adapters
        replaced(folder)
        second = (await pool.prepared("a")).adapters
        assert first is not second
        assert first
        assert second
        assert first.added is second.added
