"""Adapters through the server's end, with a real engine process at the other."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from mlx_server.engine.messages import AdapterLoaded
from mlx_server.errors import AdapterInvalid, EngineDied, GenerationFailed
from tests.engine.clients import ENDLESS, answered, ask, asynchronous, first_token, freeze, running
from tests.worker.batch_runs import Ask, alone, ids
from tests.worker.lora_files import contents, mlx_adapter, save, with_adapter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def one(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlx_adapter(tmp_path_factory.mktemp("adapters") / "one", tiny_path)


@asynchronous
async def test_rows_with_and_without_an_adapter_share_a_request(tiny_path: Path, one: Path) -> None:
    async with running(tiny_path) as engine:
        loaded = await engine.load_adapter("tiny", "d1", str(one))
        nbytes = sum(array.nbytes for array in contents(one)[1].values())
        assert loaded == AdapterLoaded("tiny", "d1", nbytes)
        rows = [ask(9, adapter="d1"), ask(9), ask(9, adapter="d1", adapter_scale=0.0)]
        adapted, *bases = await answered(engine, *rows)
        for folder, answer in [(one, adapted), *((None, base) for base in bases)]:
            expected = alone(with_adapter(tiny_path, folder), Ask(rows[0].prompt, 9))
            assert ids(answer) == ids(expected)
        assert ids(adapted) != ids(bases[0])

        await asyncio.gather(*(engine.unload_adapter("tiny", "d1") for _ in range(3)))
        with pytest.raises(GenerationFailed, match="d1 is not loaded"):
            await answered(engine, ask(9, adapter="d1"))
        await engine.unload_adapter("tiny", "d1")


@asynchronous
async def test_an_adapter_that_does_not_fit_is_the_owners_to_mend(
    tiny_path: Path, one: Path, tmp_path: Path
) -> None:
    config, tensors = contents(one)
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.lora_a"] = tensors[f"{name}.lora_a"][1:]
    bad = save(tmp_path / "bad", config, tensors)
    async with running(tiny_path) as engine, engine.generate([ask(ENDLESS)]) as feed:
        await first_token(feed)
        with pytest.raises(AdapterInvalid, match=f"can't be used: {name}") as refused:
            await engine.load_adapter("tiny", "d1", str(bad))
        assert (refused.value.status, refused.value.code) == (400, "adapter_invalid")
        with pytest.raises(AdapterInvalid, match="other is not loaded"):
            await engine.load_adapter("other", "d1", str(one))
        await engine.load_adapter("tiny", "d1", str(one))
        await first_token(feed)


@asynchronous
async def test_who_does_not_wait_for_a_load_disturbs_nobody(tiny_path: Path, one: Path) -> None:
    async with running(tiny_path) as engine:
        pid = freeze(engine)
        waiting = [
            asyncio.create_task(engine.load_adapter("tiny", "d1", str(one))) for _ in range(2)
        ]
        gone = asyncio.create_task(engine.load_adapter("tiny", "d2", "/nowhere"))
        await asyncio.sleep(0)  # they have asked
        for task in (waiting[0], gone):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        os.kill(pid, signal.SIGCONT)
        assert (await waiting[1]).adapter == "d1"
        assert len((await answered(engine, ask(adapter="d1")))[0]) == 5
        assert not engine._replies


@asynchronous
async def test_who_waits_for_a_lost_engine_is_told(tiny_path: Path, one: Path) -> None:
    async with running(tiny_path) as engine:
        pid = freeze(engine)
        waiting = [
            asyncio.create_task(engine.load_adapter("tiny", "d1", str(one))),
            asyncio.create_task(engine.unload_adapter("tiny", "d2")),
        ]
        await asyncio.sleep(0)  # they have asked
        os.kill(pid, signal.SIGKILL)
        for task in waiting:
            with pytest.raises(EngineDied):
                await task
        with pytest.raises(EngineDied):
            await engine.load_adapter("tiny", "d1", str(one))
