"""Requests that the memory has no room for are refused with the sizes and the reason."""

import re
from dataclasses import replace

import pytest

from mlx_server.errors import NotEnoughMemory, Overloaded
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.prepare import ModelSpec
from tests.pool.machine import (
    ONE,
    Holding,
    advance,
    asking,
    held,
    run,
    running,
    state,
    turns,
    waiting,
)


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
                advance(6)
                with pytest.raises(Overloaded, match=r"1[1-9] seconds") as caught:
                    await task
                assert "Retry-After" in caught.value.headers
                assert machine.log == ["load a"]
            await held(pool, "b")

    run(test)
