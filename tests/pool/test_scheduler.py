"""The policy's decisions are carried out: loads, leases, limits and refusals."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import ModelLoaded, StepOutput
from mlx_server.errors import ModelUnusable, NotEnoughMemory, Overloaded, ServerError
from mlx_server.models.adapter_catalog import AdapterSpec
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare
from tests.pool.machine import (
    ONE,
    TWO,
    WEIGHTS,
    Holding,
    advance,
    asking,
    asks,
    assert_idle,
    cancelled,
    held,
    results,
    run,
    running,
    sleep_through,
    state,
    turns,
    view,
    waiting,
)


def test_a_model_is_loaded_once_for_all_who_want_it(a: ModelSpec) -> None:
    async def test() -> None:
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

    run(test)


def test_what_a_tower_takes_is_counted_while_its_model_is_loaded(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeing(*given: Any, **named: Any) -> PreparedModel:
        return replace(prepare(*given, **named), tower_bytes=7)

    monkeypatch.setattr("mlx_server.pool.models.prepare", seeing)

    async def test() -> None:
        async with running(a) as (pool, _):
            await held(pool)
            assert pool.memory()["used"] == WEIGHTS + 7

    run(test)


def test_a_failed_load_is_told_to_all_who_wait_and_tried_again(a: ModelSpec) -> None:
    async def test() -> None:
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

    run(test)


def test_a_load_that_fails_in_no_known_way_leaves_nobody_waiting(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **how: Any) -> ModelLoaded:
        raise ZeroDivisionError("secret")

    async def test() -> None:
        async with running(a) as (pool, _):
            with monkeypatch.context() as patched:
                patched.setattr(EngineClient, "load", broken)
                with pytest.raises(ServerError, match="log"):
                    await held(pool)
            await held(pool)

    run(test)
    assert "ZeroDivisionError: secret" in caplog.text


def test_places_and_leases_are_given_back_whatever_happens(a: ModelSpec) -> None:
    async def fails_inside(pool: Pool) -> None:
        with pool.row_slots.take(2):
            async with pool.lease(await pool.prepared("a"), asks(7)):
                assert pool.row_slots.taken == 2
                assert (view(pool).leases, pool.memory()["kv_reserved"]) == (1, 7)
                raise ZeroDivisionError

    async def test() -> None:
        async with running(a) as (pool, _):
            with pytest.raises(ZeroDivisionError):
                await fails_inside(pool)
            assert_idle(pool)

    run(test)


def test_a_crowd_for_two_models_in_room_for_one_is_served(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, machine):
            names = ["a", "b"] * 15
            models = await asyncio.gather(*(held(pool, name, kv_bytes=20) for name in names))
            assert [model.prepared.id for model in models] == names
            assert machine.most == WEIGHTS

    run(test)


def test_idle_adapters_give_way_after_the_prompt_cache(a: ModelSpec, b: ModelSpec) -> None:
    async def used(pool: Pool, name: str) -> None:
        spec = AdapterSpec(name, Path(name), name, 8, 20, "lora", None, "mlx")
        async with pool.lease(await pool.prepared("a"), asks(0), LeasedAdapter(spec)):
            pass

    async def test() -> None:
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
                assert [
                    name for name, *_ in pool.engines[0].scheduler.adapters.loaded_for("a")
                ] == ["newer"]
                assert pool.memory()["prompt_cache"] == 30, "an idle adapter gives way to it too"

    run(test)


def test_a_model_that_nobody_asks_for_is_unloaded_after_its_time(
    a: ModelSpec, b: ModelSpec
) -> None:
    async def test() -> None:
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

    run(test)


def test_whoever_leaves_while_it_loads_leaves_nothing_behind(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            task = asking(pool, kv_bytes=9, rows=7)
            await machine.asked("load a")
            assert pool.row_slots.taken == 7
            await cancelled(task)
            assert_idle(pool)
            machine.speak()
            await held(pool)
            assert machine.log == ["load a"]

    run(test)


def test_a_lease_granted_to_somebody_who_was_cancelled_is_given_back(
    a: ModelSpec, b: ModelSpec
) -> None:
    """Between the moment that a task is cancelled and the one in which it learns of it."""

    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, _), Holding(pool, "a", 30) as holding:
            task = asking(pool, "a", kv_bytes=30)
            await waiting(pool, 1)
            task.cancel()
            await holding.let_go()
            await asyncio.wait([task])
            assert task.cancelled()
            assert_idle(pool)
            await held(pool, "b")

    run(test)


@pytest.mark.parametrize(("chosen", "most"), [(None, 200), (0, 0), (70, 70), (999, 999)])
def test_the_prompt_cache_takes_what_models_leave(
    a: ModelSpec, chosen: int | None, most: int
) -> None:
    """The engine keeps to the smaller of the two."""

    async def test() -> None:
        limits = replace(TWO, prompt_cache=chosen)
        async with running(a, limits=limits) as (pool, machine):
            assert machine.limits["cache_bytes"] == most
            assert machine.room == 200
            async with Holding(pool, "a", kv_bytes=30) as holding:
                assert machine.room == 200 - WEIGHTS, "its rows may continue what is cached"
                holding.begin()
                assert machine.room == 200 - WEIGHTS - 30
            assert machine.room == 200 - WEIGHTS

    run(test)


def test_a_cache_that_was_handed_over_keeps_to_the_room_that_there_is(a: ModelSpec) -> None:
    """The engine kept it before the rows of its lease had given their memory back."""

    async def test() -> None:
        async with running(a) as (pool, machine), Holding(pool, "a", kv_bytes=30) as holding:
            machine.cached = 130
            holding.begin()
            stepped = StepOutput("a", [], 0, active_bytes=190, cache_bytes=130)
            machine.report(stepped)
            assert machine.log[-1] == "shrink to 110"
            assert pool.memory()["prompt_cache"] == 110

    run(test)


def test_what_never_fits_is_told_at_once_with_both_sizes(a: ModelSpec, huge: ModelSpec) -> None:
    async def test() -> None:
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

    run(test)


def test_what_pinned_models_keep_is_told(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, pinned=True), b, limits=ONE) as (pool, _):
            await held(pool, "a")
            kept = r"100 bytes \(set by .*\), of which pinned models keep 60"
            with pytest.raises(NotEnoughMemory, match=kept):
                await held(pool, "b")

    run(test)


def test_waiting_for_memory_is_bounded(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
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

    run(test)
