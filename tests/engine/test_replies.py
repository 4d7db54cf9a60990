"""What loads, unloads and measurements wait for."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from mlx_server.engine.messages import KvCost
from mlx_server.errors import EngineDied, GenerationFailed, ModelUnusable
from tests.engine.clients import (
    ENDLESS,
    answered,
    ask,
    asynchronous,
    freeze,
    ignored,
    running,
    until_it_fails,
)
from tests.worker.batch_runs import ids

pytestmark = pytest.mark.slow


@pytest.mark.alone
@asynchronous
async def test_what_rows_take_is_known_before_their_model_is_loaded(
    tiny_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    async with running() as engine:
        with pytest.raises(ModelUnusable, match=r"'odd' can't be loaded: .*missing"):
            await engine.kv_cost("odd", str(tmp_path))
        costs = [engine.kv_cost("tiny", str(tiny_path)) for _ in range(2)]
        assert await asyncio.gather(*costs) == [KvCost(2 * 2 * 2 * 16 * 4)] * 2
        pid = freeze(engine)
        waiting = asyncio.create_task(engine.kv_cost("tiny", str(tiny_path)))
        await asyncio.sleep(0)  # it has asked
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await waiting


@asynchronous
async def test_whoever_unloads_a_model_hears_when_it_is_gone(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        request = asyncio.create_task(until_it_fails(engine, ask(ENDLESS)))
        await asyncio.sleep(0)  # it has asked
        await asyncio.gather(*(engine.unload("tiny") for _ in range(3)))
        with pytest.raises(GenerationFailed, match="unloaded"):
            await request
        await engine.unload("tiny")
        with pytest.raises(GenerationFailed, match="tiny"):
            await until_it_fails(engine, ask())
        await engine.load("tiny", str(tiny_path), ignored)
        assert len((await answered(engine, ask()))[0]) == 5


@asynchronous
async def test_a_load_given_up_leaves_the_engine_serving(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        loading = asyncio.create_task(engine.load("second", str(tiny_path), ignored))
        await asyncio.sleep(0)  # it has been sent
        loading.cancel()
        third = await engine.load("third", str(tiny_path), ignored)
        assert third.model == "third"
        second, tiny = await answered(engine, ask(model="second"), ask())
        assert ids(second) == ids(tiny)
