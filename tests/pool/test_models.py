"""The models that are served: their names, their files, and their preparation."""

import asyncio
import json
import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.messages import KvCost, MeasureCache, ModelLoading
from mlx_server.errors import ModelNotFound, ModelUnusable, ServerError
from mlx_server.models.checkpoint import read_checkpoint
from mlx_server.models.files import MOST_BYTES
from mlx_server.pool import models as entries
from mlx_server.pool import prepare as preparing
from mlx_server.pool.models import DiskThreads, LogLineProgress, PoolEntry, ServedModels
from mlx_server.pool.prepare import Capabilities, ModelSpec, capabilities_on_disk
from tests.families import byte_level, write_checkpoint
from tests.pool.machine import (
    BYTES,
    Engine,
    asking,
    cancelled,
    held,
    results,
    running,
    state,
    turns,
    view,
)
from tests.tables import cases

MODELS = ServedModels(
    [ModelSpec("qwen", "/models/qwen", aliases=("gpt-4", "q:4")), ModelSpec("glm", "/models/glm")]
)


@cases
def test_a_name_is_split_where_a_model_ends(name: str, model: str, adapter: str | None) -> None:
    assert MODELS.split(name) == (model, adapter)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3:4b", "qwen3-4b, qwen3-8b, "),
        ("Qwen3-8B-MLX", "qwen3-8b, qwen3-4b, "),
        ("mediocre", "medium, "),
        ("x" * 10_000, ""),
    ],
)
def test_an_unknown_model_is_told_the_nearest_of_many(
    a: ModelSpec, name: str, nearest: str
) -> None:
    ids = ("qwen3-4b", "qwen3-8b", "smollm2", "gpt-oss-20b")
    specs = [replace(a, id=id, aliases=("medium",) if id == ids[1] else ()) for id in ids]
    with pytest.raises(ModelNotFound) as caught:
        ServedModels(specs).spec(name)
    assert f"The nearest of the 5 that are served: {nearest}" in caught.value.message
    assert len(caught.value.message) < 400


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[ModelSpec]:
    """The models whose files were read."""
    read: list[ModelSpec] = []

    def look(spec: ModelSpec) -> Capabilities | None:
        read.append(spec)
        return capabilities_on_disk(spec)

    monkeypatch.setattr(entries, "capabilities_on_disk", look)
    return read


def checkpoint(folder: Path) -> Path:
    made = write_checkpoint(folder, byte_level(), config={"model_type": "llama"})
    (made / "model.safetensors").write_bytes(bytes(8))
    return made


def architecture(entry: PoolEntry) -> str | None:
    return entry.capabilities.architecture if entry.capabilities else None


def test_the_list_of_models_reads_what_is_of_a_model_and_no_more(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    config, spec = folder / "config.json", ModelSpec("m", str(folder))
    assert capabilities_on_disk(spec)
    config.rename(tmp_path / "config.json")
    config.symlink_to("../config.json")
    assert capabilities_on_disk(spec) is None
    config.unlink()
    config.write_text((tmp_path / "config.json").read_text() + " " * MOST_BYTES[config.name])
    assert capabilities_on_disk(spec) is None


def test_files_of_no_use_are_read_again_once_they_have_changed(
    tmp_path: Path, reads: list[ModelSpec]
) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "config.json").write_text("{")
    entry = PoolEntry(ModelSpec("m", str(folder)))
    for _ in range(3):
        entry.look_for_capabilities()
    assert len(reads) == 1
    assert architecture(entry) is None
    (folder / "config.json").write_text('{"model_type": "llama"}')
    entry.look_for_capabilities()
    assert architecture(entry) == "llama"


pytestmark = pytest.mark.anyio

CLIENTS = 40
"""More than asyncio's own threads on most machines."""
HANG = 20.0


class SlowDisk:
    """A source whose files are read when the test lets it answer."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = threading.Event()
        self.readers = 0

    def read(self) -> str:
        self.readers += 1
        self.asked.set()
        self.answers.wait()
        return "read"


async def test_clients_that_leave_are_not_read_for() -> None:
    threads, slow = DiskThreads(["slow"]), SlowDisk()
    clients = [asyncio.create_task(threads.run_in_turn("slow", slow.read)) for _ in range(CLIENTS)]
    await asyncio.to_thread(slow.asked.wait, HANG)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    slow.answers.set()
    assert await asyncio.wait_for(threads.run_in_turn("slow", slow.read), HANG) == "read"
    assert slow.readers == 2


async def test_stopping_waits_for_no_disk() -> None:
    threads, slow = DiskThreads(["slow"]), SlowDisk()
    client = asyncio.create_task(threads.run_in_turn("slow", slow.read))
    await asyncio.to_thread(slow.asked.wait, HANG)
    await asyncio.wait_for(threads.stop(0.01), HANG)
    assert not client.done()
    slow.answers.set()
    await client


async def test_a_pool_serves_models_of_other_disks(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request for a model that is not in memory looks whether its files were replaced."""
    slow, path = SlowDisk(), str(tiny_path)

    def is_current(prepared: object) -> bool:
        if getattr(prepared, "id", "") == "slow":
            slow.read()
        return True

    async with running(ModelSpec("slow", path), ModelSpec("quick", path)) as (pool, _):
        await asyncio.gather(pool.prepared("slow"), pool.prepared("quick"))
        monkeypatch.setattr("mlx_server.pool.models.is_current", is_current)
        clients = [asyncio.create_task(pool.prepared("slow")) for _ in range(CLIENTS)]
        await asyncio.to_thread(slow.asked.wait, HANG)
        try:
            assert (await asyncio.wait_for(pool.prepared("quick"), HANG)).id == "quick"
            assert await asyncio.wait_for(pool.adapter_names("quick"), HANG) == []
        finally:
            slow.answers.set()
        await asyncio.gather(*clients)


async def test_its_files_are_read_once_for_all_who_want_it(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    prepare = preparing.prepare

    def counted(spec: ModelSpec, *rest: Any, **more: Any) -> Any:
        reads.append(spec.id)
        return prepare(spec, *rest, **more)

    monkeypatch.setattr("mlx_server.pool.models.prepare", counted)

    async with running(a) as (pool, _):
        first, *others = await asyncio.gather(*(pool.prepared("a") for _ in range(20)))
        assert all(other is first for other in others)
        assert await pool.prepared("default") is first
        assert reads == ["a"]


@pytest.mark.usefixtures("sizes")
async def test_files_that_are_repaired_are_read_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level(), config={"model_type": "gpt2"})
    async with running(ModelSpec("a", str(tmp_path))) as (pool, _):
        with pytest.raises(ModelUnusable, match="safetensors"):
            await held(pool)
        assert "safetensors" in (view(pool).error or "")
        assert (state(pool), view(pool).progress) == ("unloaded", None)
        (tmp_path / "model.safetensors").touch()
        assert (await held(pool)).prepared.id == "a"
        assert view(pool).error is None


@pytest.fixture
def own(a: ModelSpec, tmp_path: Path) -> ModelSpec:
    """A model whose files a test may change."""
    return replace(a, source=str(shutil.copytree(a.source, tmp_path / "own")))


async def test_a_model_that_is_not_measured_is_measured_again_when_its_files_change(
    own: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def failing(engine: Engine, command: MeasureCache) -> KvCost:
        asked.append(command.model)
        raise ModelUnusable("Model 'a' can't be loaded: no layers")

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


async def test_files_that_are_unusable_are_not_read_again(
    own: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config of 9,999 layers has the engine make them all."""
    file, read = Path(own.source) / "config.json", list[Path]()

    def counted(folder: Path, *rest: Any) -> Any:
        read.append(folder)
        return read_checkpoint(folder, *rest)

    monkeypatch.setattr("mlx_server.pool.prepare.read_checkpoint", counted)
    whole = file.read_text()

    async with running(own) as (pool, _):
        file.write_text(json.dumps({**json.loads(whole), "num_hidden_layers": 9_999}))
        errors = [*await results(asking(pool)), *await results(asking(pool), asking(pool))]
        assert all("num_hidden_layers is 9999" in str(error) for error in errors)
        assert len(read) == 1
        file.write_text(whole)
        await held(pool)


@pytest.mark.parametrize("of_files", [True, False])
async def test_a_load_that_fails_is_tried_again_unless_its_files_are_to_blame(
    own: ModelSpec, of_files: bool
) -> None:
    async with running(own) as (pool, machine):
        machine.broken, machine.blames_files = {"a"}, of_files
        for _ in range(3):
            (error,) = await results(asking(pool))
            assert str(error) == "Model 'a' can't be loaded: no room"
        assert len(machine.log) == (1 if of_files else 3)
        machine.broken = set()
        (Path(own.source) / "config.json").touch()
        await held(pool)


async def test_an_unknown_family_is_told_before_anything_is_loaded(a: ModelSpec) -> None:
    async with running(replace(a, family="llama")) as (pool, machine):
        with pytest.raises(ServerError, match="Known families"):
            await held(pool)
        assert machine.log == []


async def test_what_nobody_expected_of_the_files_is_an_error_and_no_end(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    async with running(a) as (pool, _):
        with monkeypatch.context() as patched:
            patched.setattr("mlx_server.pool.models.prepare", broken)
            errors = await results(*(asking(pool) for _ in range(3)))
        assert {type(error) for error in errors} == {ServerError}
        assert not any("secret" in str(error) for error in errors)
        await held(pool)
    assert "ZeroDivisionError: secret" in caplog.text


async def test_progress_is_told_by_model(a: ModelSpec) -> None:
    seen: list[tuple[str, str, int, int]] = []
    async with running(a, on_progress=lambda *progress: seen.append(progress), silent=True) as (
        pool,
        machine,
    ):
        task = asking(pool)
        await machine.asked("load a")
        machine.report(ModelLoading("a", 5, 10))
        assert seen == [("a", "loading", 5, 10)]
        progress = view(pool).progress
        assert progress
        assert (progress.what, progress.done, progress.total) == ("loading", 5, 10)
        machine.speak()
        await task
        assert view(pool).progress is None


async def test_whoever_leaves_while_the_files_are_read_leaves_nothing_behind(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(a) as (pool, _):
        impatient, patient = asking(pool), asking(pool)
        await turns(3)
        assert (state(pool), pool.row_slots.taken) == ("preparing", 2)
        await cancelled(impatient)
        assert pool.row_slots.taken == 1
        await patient


def test_a_quarter_is_logged_once_for_each_model_and_kind_of_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mlx_server.pool")
    progress = LogLineProgress()
    for done in range(0, 101, 5):
        progress("a", "loading", done, 100)
    assert caplog.messages == [f"a: loading {percent} %" for percent in (0, 25, 50, 75, 100)]
    caplog.clear()
    progress("a", "downloading", 99, 100)
    progress("b", "loading", 100, 100)
    assert caplog.messages == ["a: downloading 75 %", "b: loading 100 %"]
