"""An engine that is started, lost and replaced or stopped, and the models it has at the start."""

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine import supervisor
from mlx_server.engine.messages import ModelLoaded
from mlx_server.errors import EngineDied, ModelUnusable, NotEnoughMemory, ShuttingDown
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.system.servers import OtherServer, Servers
from tests.pool.machine import (
    ONE,
    WEIGHTS,
    Engine,
    Holding,
    Machine,
    asking,
    asks,
    assert_idle,
    held,
    results,
    run,
    running,
    state,
    turns,
    until,
    view,
    waiting,
)


def test_the_budget_is_said_at_the_start(a: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        caplog.set_level(logging.INFO, "mlx_server.pool")
        async with running(a):
            assert "memory budget: 200 bytes, set by `memory_budget`" in caplog.text
            assert "WARNING" not in caplog.text
        async with running(a, limits=PoolLimits(budget=1 << 50)):
            assert "WARNING" in caplog.text
            assert "Lower `memory_budget`" in caplog.text

    run(test)


async def started_again(pool: Pool, machine: Machine, times: int = 1) -> None:
    await until(lambda: len(machine.engines) > times and pool.supervisor.alive)


def test_a_lost_engine_is_replaced_and_models_load_on_demand(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b) as (pool, machine):
            await held(pool, "a")
            await held(pool, "b")
            machine.kill()
            assert not pool.supervisor.alive
            await started_again(pool, machine)
            assert (state(pool, "a"), state(pool, "b")) == ("unloaded", "unloaded")
            assert pool.models.loaded == []
            await held(pool, "a")
            assert machine.log == ["load a", "load b", "load a"]
            assert pool.supervisor.restarts == 1

    run(test)


def test_those_who_wait_for_a_load_are_told_that_the_engine_is_lost(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            tasks = [asking(pool, kv_bytes=5) for _ in range(3)]
            await waiting(pool, 3)
            await machine.asked("load a")
            machine.kill()
            errors = await results(*tasks)
            assert {type(error) for error in errors} == {EngineDied}
            assert_idle(pool)
            await started_again(pool, machine)
            machine.speak()
            await held(pool)
            assert machine.log == ["load a", "load a"]

    run(test)


def test_those_who_wait_for_memory_are_told_that_the_engine_is_lost(
    a: ModelSpec, b: ModelSpec
) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, machine):
            async with Holding(pool, "a", kv_bytes=5):
                tasks = [asking(pool, "b"), asking(pool, "a", kv_bytes=40)]
                await waiting(pool, 2)
                machine.kill()
                errors = await results(*tasks)
                assert {type(error) for error in errors} == {EngineDied}
                # the lease is void, and giving it back changes nothing
                assert (view(pool).leases, pool.memory()["used"]) == (0, 0)
                await started_again(pool, machine)
                await held(pool, "b")
            assert [view.leases for view in pool.views()] == [0, 0]

    run(test)


def test_an_engine_lost_just_after_it_said_that_it_has_loaded(a: ModelSpec) -> None:
    """The load ended well, and the pool has not heard of it when it hears of the loss."""

    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            task = asking(pool)
            await machine.asked("load a")
            machine.report(ModelLoaded("a", 500, WEIGHTS))
            machine.kill()
            with pytest.raises(EngineDied):
                await task
            assert (state(pool), pool.models.loaded) == ("unloaded", [])
            await started_again(pool, machine)
            machine.silent = False
            await held(pool)
            assert machine.log == ["load a", "load a"]

    run(test)


def test_an_engine_lost_just_after_a_lease_was_granted(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, limits=ONE) as (pool, machine), Holding(pool, "a", 30) as holding:
            prepared = await pool.prepared("a")
            reached = asyncio.Event()

            async def generating() -> None:
                async with pool.lease(prepared, asks(30)):
                    reached.set()
                    _ = pool.engines[0].engine  # as the owner of a lease does next

            task = asyncio.create_task(generating())
            await waiting(pool, 1)
            machine.kill()
            await holding.let_go()
            with pytest.raises(EngineDied):
                await task

    run(test)


def test_without_an_engine_the_answer_is_an_error_and_not_a_wait(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 3600.0)

    async def test() -> None:
        async with running(a) as (pool, machine):
            await pool.prepared("a")
            machine.kill()
            for _ in range(3):
                with pytest.raises(EngineDied) as caught:
                    await held(pool)
                assert "Retry-After" in caught.value.headers
                await turns()
            assert (machine.log, state(pool)) == ([], "unloaded")

    run(test)


def test_engines_lost_again_and_again_are_replaced(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, preload=True)) as (pool, machine):
            for times in range(1, 6):
                await machine.asked("load a", times)
                await turns(times)  # at different moments of the load
                machine.kill()
                await started_again(pool, machine, times)
            await held(pool)
            assert machine.log == ["load a"] * 6

    run(test)


def test_preloading_begins_at_the_start_and_only_where_asked_for(
    a: ModelSpec, b: ModelSpec
) -> None:
    async def test() -> None:
        async with running(a, replace(b, preload=True), silent=True) as (pool, machine):
            await machine.asked("load b")
            assert (state(pool, "b"), state(pool, "a")) == ("loading", "unloaded")
            assert [each.is_preloading for each in pool.views()] == [False, True]
            machine.speak()
            assert (await held(pool, "b")).prepared.id == "b"
            assert not any(each.is_preloading for each in pool.views())
            assert machine.log == ["load b"]

    run(test)


@pytest.mark.parametrize("error", [ModelUnusable("No room."), OSError("No room.")])
def test_a_preload_that_fails_is_logged(
    a: ModelSpec,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    async def test() -> None:
        monkeypatch.setattr("mlx_server.pool.models.prepare", broken)
        async with running(replace(a, preload=True)) as (pool, machine):
            await until(lambda: view(pool).error is not None)
            monkeypatch.undo()
            assert (machine.log, state(pool)) == ([], "unloaded")

    run(test)
    assert "No room." in caplog.text
    assert "never retrieved" not in caplog.text


def test_stopping_ends_loads_with_a_word_to_all_who_wait(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            tasks = [asking(pool) for _ in range(3)]
            await waiting(pool, 3)
            error = ShuttingDown("Closing for today.")
            await pool.stop(error)
            reported = await results(*tasks)
            assert [str(each) for each in reported] == ["Closing for today."] * 3
            assert [type(each) for each in reported] == [ShuttingDown] * 3
            engine = machine.engines[-1]
            assert isinstance(engine, Engine)
            assert engine.ended_with == [error]
            assert pool.models.loaded == []

    run(test)


def test_stopping_tells_those_who_wait_for_memory(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, ttl=5), b, limits=ONE) as (pool, machine):
            async with Holding(pool, "a"):
                task = asking(pool, "b")
                await waiting(pool, 1)
                await pool.stop()
                with pytest.raises(ShuttingDown):
                    await task
            # nothing is begun when the last lease ends
            assert machine.log == ["load a"]
            assert pool.engines[0].scheduler.timer
            assert pool.engines[0].scheduler.timer.cancelled()

    run(test)


def test_stopping_tells_those_who_wait_for_the_files(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a) as (pool, machine):
            tasks = [asking(pool) for _ in range(3)]
            await turns(3)
            assert state(pool) == "preparing"
            await pool.stop()
            assert [type(each) for each in await results(*tasks)] == [ShuttingDown] * 3
            assert machine.log == []

    run(test)


def test_a_pool_that_was_stopped_takes_nobody(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a) as (pool, machine):
            prepared = (await held(pool)).prepared
            await pool.stop()
            with pytest.raises(ShuttingDown):
                await pool.prepared("a")
            with pytest.raises(ShuttingDown):
                async with pool.lease(prepared, asks(0)):
                    pass
            assert machine.log == ["load a"]

    run(test)


def test_a_model_whose_first_request_finds_no_engine_is_read_by_the_next(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a) as (pool, machine):
            machine.kill()
            assert not pool.supervisor.alive
            assert (await pool.prepared("a")).id == "a"
            assert pool.supervisor.alive

    run(test)


def test_memory_that_another_server_takes_first_is_not_taken_twice(
    a: ModelSpec, tmp_path: Path
) -> None:
    async def test() -> None:
        async with running(a) as (pool, machine):
            pool.servers, other = Servers(tmp_path), Servers(tmp_path)
            other.exchange(1 << 60)
            (error,) = await results(asking(pool))
            assert isinstance(error, NotEnoughMemory)
            assert machine.log == []
            assert pool.memory()["budget"] == 0
            other.leave()
            await pool.share_memory()
            await held(pool)
            assert machine.log == ["load a"]
            assert other.others() == {pool.servers.id: OtherServer(WEIGHTS, os.getpid())}

    run(test)


def test_memory_of_a_server_that_is_being_replaced_is_waited_for(
    a: ModelSpec, tmp_path: Path
) -> None:
    async def test() -> None:
        async with running(a) as (pool, machine):
            pool.servers, before = Servers(tmp_path), Servers(tmp_path)
            pool.servers.generation = 1
            before.exchange(1 << 60)
            await pool.share_memory()
            waiting = asyncio.create_task(held(pool))
            await asyncio.sleep(0)
            assert (machine.log, pool.memory()["budget"]) == ([], 0)
            before.leave()
            await pool.share_memory()
            await waiting
            assert machine.log == ["load a"]

    run(test)
