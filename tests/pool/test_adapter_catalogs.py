"""Adapters that clients load and remove while a pool serves."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server import limits as table
from mlx_server.errors import AdapterNotFound, BadRequest
from mlx_server.pool.prepare import ModelSpec
from tests.pool.machine import TWO, asks, running, turns

pytestmark = pytest.mark.anyio


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """One adapter, for any base."""
    shutil.copytree(Path(__file__).parents[2] / "adapters" / "pirate", tmp_path / "pirate")
    config = tmp_path / "pirate" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"model": None}))
    return tmp_path


async def test_an_adapter_that_was_unloaded_while_its_request_waited_is_not_loaded_again(
    a: ModelSpec, samples: Path
) -> None:
    limits = replace(TWO, budget=10**9)

    async with running(a, limits=limits, adapter_dirs=[samples]) as (pool, machine):
        await pool.add_adapter("a", "new", str(samples / "pirate"))
        prepared = await pool.prepared("a")
        adapter = await pool.adapter(prepared, "new")
        async with pool.lease(prepared, asks(0), adapter):
            pass
        await pool.remove_adapter("a", "new")
        with pytest.raises(AdapterNotFound):
            async with pool.lease(prepared, asks(0), adapter):
                raise AssertionError
        await turns()
        assert pool.engines[0].scheduler.adapters.loaded_for("a") == []
        loaded = f"load a {adapter.spec.digest}"
        assert machine.log == ["load a", loaded, f"un{loaded}"]
        for remove in ("new", "nobody"):
            with pytest.raises(AdapterNotFound):
                await pool.remove_adapter("a", remove)


async def test_clients_load_so_many_adapters_and_no_more(
    a: ModelSpec, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "ADDED_ADAPTERS", 2)

    async with running(a, adapter_dirs=[samples]) as (pool, _):
        for name in ("one", "two", "one"):
            await pool.add_adapter("a", name, str(samples / "pirate"))
        with pytest.raises(BadRequest, match="Clients have loaded 2 adapters"):
            await pool.add_adapter("a", "three", str(samples / "pirate"))
        await pool.remove_adapter("a", "two")
        await pool.add_adapter("a", "three", str(samples / "pirate"))
