"""An engine that is started, lost and replaced or stopped, and the models it has at the start."""

import asyncio
import logging
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_server.engine import supervisor
from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import (
    Command,
    ComputeAhead,
    Generate,
    KvCost,
    ModelLoaded,
    StepOutput,
    Stop,
    Token,
)
from mlx_server.errors import (
    EngineDied,
    ModelUnusable,
    NotEnoughMemory,
    Overloaded,
    ServerError,
    ShuttingDown,
)
from mlx_server.generation.plan import plan
from mlx_server.models.adapter_reader import AdapterSpec
from mlx_server.pool import lease as lease_of_rows
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.engine_models import NextPrompts, PoolLimits
from mlx_server.pool.lease import SOON, Lease, Leases, MemoryDemand
from mlx_server.pool.pool import Pool, RowSlots
from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare
from mlx_server.requests import GenerateRequest, SamplingParams
from mlx_server.system.servers import OtherServer, Servers
from tests.pool.machine import (
    BYTES,
    ONE,
    TWO,
    WEIGHTS,
    Engine,
    Holding,
    Machine,
    advance,
    asking,
    asks,
    assert_idle,
    cancelled,
    held,
    results,
    running,
    sleep_through,
    state,
    turns,
    until,
    view,
    waiting,
)

pytestmark = pytest.mark.anyio


async def test_the_budget_is_said_at_the_start(
    a: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlx_server.pool")
    async with running(a):
        assert "memory budget: 200 bytes, set by `memory_budget`" in caplog.text
        assert "WARNING" not in caplog.text
    async with running(a, limits=PoolLimits(budget=1 << 50)):
        assert "WARNING" in caplog.text
        assert "Lower `memory_budget`" in caplog.text


async def started_again(pool: Pool, machine: Machine, times: int = 1) -> None:
    await until(lambda: len(machine.engines) > times and pool.supervisor.alive)


async def test_a_lost_engine_is_replaced_and_models_load_on_demand(
    a: ModelSpec, b: ModelSpec
) -> None:
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


async def test_those_who_wait_for_a_load_are_told_that_the_engine_is_lost(a: ModelSpec) -> None:
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


async def test_those_who_wait_for_memory_are_told_that_the_engine_is_lost(
    a: ModelSpec, b: ModelSpec
) -> None:
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


async def test_an_engine_lost_just_after_it_said_that_it_has_loaded(a: ModelSpec) -> None:
    """The load ended well, and the pool has not heard of it when it hears of the loss."""

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


async def test_an_engine_lost_just_after_a_lease_was_granted(a: ModelSpec) -> None:
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


async def test_without_an_engine_the_answer_is_an_error_and_not_a_wait(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 3600.0)

    async with running(a) as (pool, machine):
        await pool.prepared("a")
        machine.kill()
        for _ in range(3):
            with pytest.raises(EngineDied) as caught:
                await held(pool)
            assert "Retry-After" in caught.value.headers
            await turns()
        assert (machine.log, state(pool)) == ([], "unloaded")


async def test_engines_lost_again_and_again_are_replaced(a: ModelSpec) -> None:
    async with running(replace(a, preload=True)) as (pool, machine):
        for times in range(1, 6):
            await machine.asked("load a", times)
            await turns(times)  # at different moments of the load
            machine.kill()
            await started_again(pool, machine, times)
        await held(pool)
        assert machine.log == ["load a"] * 6


async def test_preloading_begins_at_the_start_and_only_where_asked_for(
    a: ModelSpec, b: ModelSpec
) -> None:
    async with running(a, replace(b, preload=True), silent=True) as (pool, machine):
        await machine.asked("load b")
        assert (state(pool, "b"), state(pool, "a")) == ("loading", "unloaded")
        assert [each.is_preloading for each in pool.views()] == [False, True]
        machine.speak()
        assert (await held(pool, "b")).prepared.id == "b"
        assert not any(each.is_preloading for each in pool.views())
        assert machine.log == ["load b"]


async def test_a_preload_without_room_is_logged(
    a: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(replace(a, preload=True), limits=PoolLimits(budget=59)) as (
        pool,
        machine,
    ):
        await until(lambda: "a is not preloaded: it needs 60 bytes, and 59 bytes" in caplog.text)
        assert (machine.log, state(pool)) == ([], "unloaded")


@pytest.mark.parametrize("error", [ModelUnusable("No room."), OSError("No room.")])
async def test_a_preload_that_fails_is_logged(
    a: ModelSpec,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("mlx_server.pool.models.prepare", broken)
    async with running(replace(a, preload=True)) as (pool, machine):
        await until(lambda: view(pool).error is not None)
        monkeypatch.undo()
        assert (machine.log, state(pool)) == ([], "unloaded")
    assert "No room." in caplog.text
    assert "never retrieved" not in caplog.text


async def test_stopping_ends_loads_with_a_word_to_all_who_wait(a: ModelSpec) -> None:
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


async def test_stopping_tells_those_who_wait_for_memory(a: ModelSpec, b: ModelSpec) -> None:
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


async def test_stopping_tells_those_who_wait_for_the_files(a: ModelSpec) -> None:
    async with running(a) as (pool, machine):
        tasks = [asking(pool) for _ in range(3)]
        await turns(3)
        assert state(pool) == "preparing"
        await pool.stop()
        assert [type(each) for each in await results(*tasks)] == [ShuttingDown] * 3
        assert machine.log == []


async def test_a_pool_that_was_stopped_takes_nobody(a: ModelSpec) -> None:
    async with running(a) as (pool, machine):
        prepared = (await held(pool)).prepared
        await pool.stop()
        with pytest.raises(ShuttingDown):
            await pool.prepared("a")
        with pytest.raises(ShuttingDown):
            async with pool.lease(prepared, asks(0)):
                pass
        assert machine.log == ["load a"]


async def test_a_model_whose_first_request_finds_no_engine_is_read_by_the_next(
    a: ModelSpec,
) -> None:
    async with running(a) as (pool, machine):
        machine.kill()
        assert not pool.supervisor.alive
        assert (await pool.prepared("a")).id == "a"
        assert pool.supervisor.alive


async def test_memory_that_another_server_takes_first_is_not_taken_twice(
    a: ModelSpec, tmp_path: Path
) -> None:
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


async def test_memory_of_a_server_that_is_being_replaced_is_waited_for(
    a: ModelSpec, tmp_path: Path
) -> None:
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


# The policy's decisions are carried out: loads, leases, limits and refusals.


async def test_a_model_is_loaded_once_for_all_who_want_it(a: ModelSpec) -> None:
    async with running(a, silent=True) as (pool, machine):
        assert state(pool) == "unloaded"
        tasks = [asking(pool) for _ in range(20)]
        await waiting(pool, 20)
        assert (state(pool), pool.row_slots.taken, pool.models.loaded) == ("loading", 20, [])
        machine.speak()
        models = await asyncio.gather(*tasks)
        models.append(await held(pool, "gpt-4"))
        assert machine.log == ["load a"]
        assert all(model is models[0] for model in models)
        assert (state(pool), pool.models.loaded) == ("ready", [models[0]])
        assert_idle(pool)


async def test_what_a_tower_takes_is_counted_while_its_model_is_loaded(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeing(*given: Any, **named: Any) -> PreparedModel:
        return replace(prepare(*given, **named), tower_bytes=7)

    monkeypatch.setattr("mlx_server.pool.models.prepare", seeing)

    async with running(a) as (pool, _):
        await held(pool)
        assert pool.memory()["used"] == WEIGHTS + 7


async def test_a_failed_load_is_told_to_all_who_wait_and_tried_again(a: ModelSpec) -> None:
    async with running(a, silent=True) as (pool, machine):
        machine.broken = {"a"}
        tasks = [asking(pool) for _ in range(5)]
        await waiting(pool, 5)
        machine.speak()
        errors = await results(*tasks)
        assert all(isinstance(error, ModelUnusable) for error in errors)
        assert {str(error) for error in errors} == {"Model 'a' can't be loaded: no room"}
        assert len({id(error) for error in errors}) == 5, "each has a traceback of its own"
        assert (state(pool), pool.models.loaded) == ("unloaded", [])
        assert view(pool).error == "Model 'a' can't be loaded: no room"
        assert_idle(pool)
        machine.broken, machine.silent = set(), True
        task = asking(pool)
        await machine.asked("load a", times=2)
        assert (state(pool), view(pool).error) == ("loading", None)
        machine.speak()
        assert (await task).prepared.id == "a"
        assert machine.log == ["load a", "load a"]


async def test_a_load_that_fails_in_no_known_way_leaves_nobody_waiting(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **how: Any) -> ModelLoaded:
        raise ZeroDivisionError("secret")

    async with running(a) as (pool, _):
        with monkeypatch.context() as patched:
            patched.setattr(EngineClient, "load", broken)
            with pytest.raises(ServerError, match="log"):
                await held(pool)
        await held(pool)
    assert "ZeroDivisionError: secret" in caplog.text


async def test_places_and_leases_are_given_back_whatever_happens(a: ModelSpec) -> None:
    async def fails_inside(pool: Pool) -> None:
        with pool.row_slots.take(2):
            async with pool.lease(await pool.prepared("a"), asks(7)):
                assert pool.row_slots.taken == 2
                assert (view(pool).leases, pool.memory()["kv_reserved"]) == (1, 7)
                raise ZeroDivisionError

    async with running(a) as (pool, _):
        with pytest.raises(ZeroDivisionError):
            await fails_inside(pool)
        assert_idle(pool)


async def test_a_crowd_for_two_models_in_room_for_one_is_served(a: ModelSpec, b: ModelSpec) -> None:
    async with running(a, b, limits=ONE) as (pool, machine):
        names = ["a", "b"] * 15
        models = await asyncio.gather(*(held(pool, name, kv_bytes=20) for name in names))
        assert [model.prepared.id for model in models] == names
        assert machine.most == WEIGHTS


async def test_idle_adapters_give_way_after_the_prompt_cache(a: ModelSpec, b: ModelSpec) -> None:
    async def used(pool: Pool, name: str) -> None:
        spec = AdapterSpec(name, Path(name), name, 8, 20, "lora", None, "mlx")
        async with pool.lease(await pool.prepared("a"), asks(0), LeasedAdapter(spec)):
            pass

    async with running(a, b) as (pool, machine):
        await used(pool, "older")
        await used(pool, "newer")
        assert pool.memory()["used"] == WEIGHTS + 20 + 20
        assert view(pool).nbytes == WEIGHTS
        machine.cached = 50
        stepped = StepOutput("a", [], 0, active_bytes=190, cache_bytes=50)
        machine.report(stepped)
        await held(pool, "b")
        assert machine.log[-2:] == ["shrink to 40", "load b"]
        assert [name for name, *_ in pool.engines[0].scheduler.adapters.loaded_for("a")] == [
            "older",
            "newer",
        ]
        async with Holding(pool, "b", kv_bytes=50) as holding:
            await turns()
            assert machine.log[-1] == "unload a older"
            holding.begin()
            assert machine.log[-1] == "shrink to 10"
            assert [name for name, *_ in pool.engines[0].scheduler.adapters.loaded_for("a")] == [
                "newer"
            ]
            assert pool.memory()["prompt_cache"] == 30, "an idle adapter gives way to it too"


async def test_a_model_that_nobody_asks_for_is_unloaded_after_its_time(
    a: ModelSpec, b: ModelSpec
) -> None:
    async with running(replace(a, ttl=5), b) as (pool, machine):
        await held(pool, "a")
        await held(pool, "b")
        async with Holding(pool, "a"):
            advance(6)
            await turns()
            assert state(pool, "a") == "ready"
        advance(4)
        await turns()
        assert state(pool, "a") == "ready"
        advance(2)
        await machine.asked("unload a")
        await turns()
        assert (state(pool, "a"), state(pool, "b")) == ("unloaded", "ready")
        await held(pool, "a")
        assert machine.log == ["load a", "load b", "unload a", "load a"]


async def test_whoever_leaves_while_it_loads_leaves_nothing_behind(a: ModelSpec) -> None:
    async with running(a, silent=True) as (pool, machine):
        task = asking(pool, kv_bytes=9, rows=7)
        await machine.asked("load a")
        assert pool.row_slots.taken == 7
        await cancelled(task)
        assert_idle(pool)
        machine.speak()
        await held(pool)
        assert machine.log == ["load a"]


async def test_a_lease_granted_to_somebody_who_was_cancelled_is_given_back(
    a: ModelSpec, b: ModelSpec
) -> None:
    """Between the moment that a task is cancelled and the one in which it learns of it."""

    async with running(a, b, limits=ONE) as (pool, _), Holding(pool, "a", 30) as holding:
        task = asking(pool, "a", kv_bytes=30)
        await waiting(pool, 1)
        task.cancel()
        await holding.let_go()
        await asyncio.wait([task])
        assert task.cancelled()
        assert_idle(pool)
        await held(pool, "b")


@pytest.mark.parametrize(("chosen", "most"), [(None, 200), (0, 0), (70, 70), (999, 999)])
async def test_the_prompt_cache_takes_what_models_leave(
    a: ModelSpec, chosen: int | None, most: int
) -> None:
    """The engine keeps to the smaller of the two."""

    limits = replace(TWO, prompt_cache=chosen)
    async with running(a, limits=limits) as (pool, machine):
        assert machine.arguments.cache_bytes == most
        assert machine.room == 200
        async with Holding(pool, "a", kv_bytes=30) as holding:
            assert machine.room == 200 - WEIGHTS, "its rows may continue what is cached"
            holding.begin()
            assert machine.room == 200 - WEIGHTS - 30
        assert machine.room == 200 - WEIGHTS


async def test_a_cache_that_was_handed_over_keeps_to_the_room_that_there_is(a: ModelSpec) -> None:
    """The engine kept it before the rows of its lease had given their memory back."""

    async with running(a) as (pool, machine), Holding(pool, "a", kv_bytes=30) as holding:
        machine.cached = 130
        holding.begin()
        stepped = StepOutput("a", [], 0, active_bytes=190, cache_bytes=130)
        machine.report(stepped)
        assert machine.log[-1] == "shrink to 110"
        assert pool.memory()["prompt_cache"] == 110


async def test_what_never_fits_is_told_at_once_with_both_sizes(
    a: ModelSpec, huge: ModelSpec
) -> None:
    limits = PoolLimits(budget=2_000_000_000)
    async with running(a, huge, limits=limits) as (pool, machine), Holding(pool, "a"):
        with pytest.raises(NotEnoughMemory) as caught:
            await held(pool, "a", kv_bytes=3_000_000_000)
        assert caught.value.status == 400
        assert caught.value.message == (
            "The model needs 60 bytes, and this request 3.0 GB more; the memory budget is 2.0 "
            "GB (set by `memory_budget` in models.yaml). Raise `memory_budget` in models.yaml, "
            "or ask for fewer tokens."
        )
        assert machine.log == ["load a"]
    async with running(huge, limits=PoolLimits(budget=300)) as (pool, machine):
        with pytest.raises(NotEnoughMemory) as caught:
            await held(pool, "huge")
        assert caught.value.message == (
            "The model needs 500 bytes; the memory budget is 300 bytes (set by `memory_budget` "
            "in models.yaml). Raise `memory_budget` in models.yaml, or choose a smaller "
            "quantisation."
        )
        assert (machine.log, state(pool, "huge")) == ([], "unloaded")
    async with running(a, limits=PoolLimits()) as (pool, _):
        with pytest.raises(NotEnoughMemory) as caught:
            await held(pool, "a", kv_bytes=10**15)
        assert re.search(
            r"budget is [\d.]+ GB \(three quarters of RAM \([\d.]+ GB\) minus [\d.]+ [GM]B to "
            r"compute in\). Raise `memory_budget`",
            caught.value.message,
        )


async def test_what_pinned_models_keep_is_told(a: ModelSpec, b: ModelSpec) -> None:
    async with running(replace(a, pinned=True), b, limits=ONE) as (pool, _):
        await held(pool, "a")
        kept = r"100 bytes \(set by .*\), of which pinned models keep 60"
        with pytest.raises(NotEnoughMemory, match=kept):
            await held(pool, "b")


async def test_waiting_for_memory_is_bounded(a: ModelSpec, b: ModelSpec) -> None:
    limits = replace(ONE, wait_seconds=10)
    async with running(a, b, limits=limits) as (pool, machine):
        async with Holding(pool, "a"):
            task = asking(pool, "b")
            await waiting(pool, 1)
            advance(5)
            await turns()
            assert not task.done()
            sleep_through(8)
            await turns()
            assert not task.done()
            advance(6)
            with pytest.raises(Overloaded, match=r"1[1-9] seconds") as caught:
                await task
            assert "Retry-After" in caught.value.headers
            assert machine.log == ["load a"]
        await held(pool, "b")


def test_a_full_queue_refuses_and_a_place_that_is_left_is_taken(a: ModelSpec) -> None:
    pool = Pool([a], PoolLimits(concurrency=2, queue=3))
    with pool.row_slots.take(1), pool.row_slots.take(3):
        assert pool.row_slots.taken == 4
        with pytest.raises(Overloaded, match="4 answers") as caught, pool.row_slots.take(2):
            pass
        assert "Retry-After" in caught.value.headers
        with pool.row_slots.take(2, "another client"):
            assert pool.row_slots.taken == 6
        assert pool.row_slots.taken == 4
        with pool.row_slots.take(1):
            assert pool.row_slots.taken == 5
    assert pool.row_slots.taken == 0
    with pool.row_slots.take(5):
        assert pool.row_slots.taken == 5


async def test_a_view_says_what_is_known(a: ModelSpec) -> None:
    async with running(a) as (pool, _):
        unseen = view(pool)
        assert (unseen.family, unseen.nbytes, unseen.last_used) == (None, 0, None)
        await pool.prepared("a")
        assert (view(pool).family, view(pool).nbytes) == ("plain", WEIGHTS)
        async with Holding(pool, "a"):
            assert (view(pool).leases, state(pool)) == (1, "ready")
        first = view(pool).last_used
        assert first
        advance(10)
        await held(pool)
        assert view(pool).last_used == pytest.approx(first, abs=5), "the clock of the wall"


def taken(places: RowSlots, on: ExitStack, client: str, rows: int = 1) -> int:
    """How many requests of so many answers it got in, until the first was refused."""
    for count in range(1000):
        try:
            on.enter_context(places.take(rows, client))
        except Overloaded:
            return count
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize("most", [*range(1, 40), 80, 300])
def test_a_client_alone_gets_all_that_was_promised(most: int) -> None:
    with ExitStack() as on:
        assert taken(RowSlots(most), on, "a") == most
    with ExitStack() as on:
        assert taken(RowSlots(most), on, "a", rows=most) == 1


@pytest.mark.parametrize("first", [1, 5, 16])
def test_one_client_keeps_nobody_out(first: int) -> None:
    places = RowSlots(80)
    with ExitStack() as on:
        assert taken(places, on, "hog", first) == 80 // first
        assert taken(places, on, "second") >= 16
        for other in "cde":
            assert taken(places, on, other) >= 1
        with pytest.raises(Overloaded) as caught:
            on.enter_context(places.take(1, "hog"))
        assert "answers are being generated or waiting, 80 of them yours" in caught.value.message
        assert "Retry-After" in caught.value.headers
        assert places.taken <= places.total == 107
    assert places.taken == 0


def test_programs_of_one_address_leave_room_for_others() -> None:
    places = RowSlots(80)
    with ExitStack() as on:
        assert taken(places, on, "127.0.0.1 0") == 80
        assert [taken(places, on, f"127.0.0.1 {at}") for at in range(1, 8)] == [11, *[0] * 6]
        assert taken(places, on, "192.0.2.7") >= 10
    with ExitStack() as on:
        assert taken(places, on, "192.0.2.7") == 80
        assert taken(places, on, "127.0.0.1 0") >= 16


MODEL: Any = None


class Reserved(dict[int, int]):
    """What each ticket's rows may take."""

    def leases(self) -> Leases:
        return Leases(lambda: cast("Any", None), lambda ticket: None, self.__setitem__)


def begun(leases: Leases, ticket: int, row: int) -> Lease:
    leases.add(MODEL, MemoryDemand(KvCost(1), 1, 10_000), ticket)
    rows = [Generate(row, "a", [1], 10_000, [], SamplingParams())]
    leases[ticket].began(rows)
    return leases[ticket]


@pytest.mark.parametrize("by", ["row", "lease"])
def test_a_lease_of_a_lost_engine_ends_without_one_that_has_its_numbers(by: str) -> None:
    reserved = Reserved()
    leases = reserved.leases()
    old = begun(leases, ticket=1, row=7)
    begun(leases, ticket=2, row=7)
    if by == "row":
        old.left([7])
    else:
        leases.remove(1)
    for _ in range(2 * SOON):
        leases.count_tokens([Token(7, 5)])
    assert reserved[2] > SOON + 1


def row(number: int, prompt: int = 2) -> Generate:
    return Generate(number, "a", [1] * prompt, 99, [], SamplingParams())


def step(machine: Machine, *numbers: int, finish: Stop | None = None) -> None:
    """Each of these rows gets a token."""
    tokens = [Token(number, 1, finish) for number in numbers]
    machine.report(StepOutput("a", tokens, 0, active_bytes=0, cache_bytes=0))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved for ten tokens at a time, three before they are needed."""
    monkeypatch.setattr(lease_of_rows, "SOON", 10)
    monkeypatch.setattr(lease_of_rows, "MARGIN", 3)


@pytest.mark.parametrize("budget", [100, 1000])
async def test_the_engine_may_pad_rows_by_what_requests_reserve_for_it(
    a: ModelSpec, budget: int
) -> None:
    async with running(a, limits=PoolLimits(budget=budget)) as (pool, machine):
        await held(pool)
        most = BYTES.most_padding(budget - WEIGHTS)
        assert machine.most_padding == {"a": most}
        request = GenerateRequest("a", ((1,) * 10,))
        planned = plan(await pool.prepared("a"), request)
        assert planned.demand.padding_bytes == BYTES.padding_bytes(most or 0)


@pytest.mark.usefixtures("ahead")
async def test_rows_reserve_memory_as_they_grow_and_the_last_wait_for_it(a: ModelSpec) -> None:
    async with running(a, limits=ONE) as (pool, machine):
        prepared = await pool.prepared("a")
        async with (
            pool.lease(prepared, asks(2, most=40)) as first,
            pool.lease(prepared, asks(2, most=40)) as last,
        ):
            first.began([row(1)])
            last.began([row(2), row(3)])
            assert pool.memory()["kv_reserved"] == 12 + 12
            for _ in range(7):
                step(machine, 1)
            assert pool.memory()["kv_reserved"] == 12 + 12
            step(machine, 1, 77)
            assert pool.memory()["kv_reserved"] == 20 + 20
            for _ in range(8):
                step(machine, 1, 3)
            assert machine.log == ["load a", "preempt [2, 3]"]
            assert pool.memory()["kv_reserved"] == 28
            last.left([3])
            last.began([row(4)])
            assert machine.log[2:] == ["preempt [4]"], "it came too late to be preempted"
            step(machine, 1, finish="stop")
            assert machine.log[3:] == ["resume [2, 4]"]
            assert pool.memory()["kv_reserved"] == 2 * 20
            last.left([2, 4])
            assert pool.memory()["kv_reserved"] == 0
        assert pool.engines[0].scheduler.leases.of_row == {}


class ComputesAhead:
    def __init__(self) -> None:
        self.ahead: list[ComputeAhead] = []

    def send(self, command: Command) -> None:
        if isinstance(command, ComputeAhead):
            self.ahead.append(command)


@pytest.mark.parametrize(
    ("error", "is_logged"), [(ServerError("no message fits"), False), (KeyError("name"), True)]
)
def test_what_can_not_be_rendered_is_not_sent(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    command, engine = ComputeAhead("m", [1, 2], 70), ComputesAhead()

    def failing() -> ComputeAhead:
        raise error

    async def both() -> None:
        prompts = NextPrompts(lambda: cast(EngineClient, engine))
        for render in (failing, lambda: command):
            prompts.begin("m", render)
        await asyncio.gather(*prompts.rendering._tasks)

    asyncio.run(both())
    assert engine.ahead == [command]
    assert ("next prompt" in caplog.text) == is_logged
