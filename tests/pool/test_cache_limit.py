"""The engine gets a new limit on the prompt cache when it changes, and when it was exceeded."""

from dataclasses import replace
from typing import cast

import pytest

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import StepOutput
from mlx_server.errors import EngineDied
from mlx_server.pool.prepare import ModelSpec
from mlx_server.pool.scheduler import CacheLimit
from tests.pool.machine import TWO, WEIGHTS, Holding, held, run, running, state


class Engine:
    def __init__(self) -> None:
        self.limits: list[int] = []
        self.is_lost = False

    def limit_cache(self, max_bytes: int) -> None:
        if self.is_lost:
            raise EngineDied("gone")
        self.limits.append(max_bytes)


def made() -> tuple[CacheLimit, Engine]:
    engine = Engine()
    return CacheLimit(lambda: cast("EngineClient", engine)), engine


def test_a_limit_is_sent_once() -> None:
    limit, engine = made()
    for nbytes in (100, 100, 50, 50, 100):
        limit.send(nbytes)
    assert engine.limits == [100, 50, 100]


def test_a_cache_that_exceeds_its_limit_gets_it_again() -> None:
    limit, engine = made()
    limit.send(100)
    limit.reported(100)
    limit.send(100)
    assert engine.limits == [100]
    limit.reported(101)
    limit.send(100)
    assert engine.limits == [100, 100]


def test_a_limit_that_did_not_arrive_is_sent_to_the_next_engine() -> None:
    limit, engine = made()
    engine.is_lost = True
    limit.send(100)
    engine.is_lost = False
    limit.send(100)
    limit.engine_lost()
    limit.send(100)
    assert engine.limits == [100, 100]


def test_a_cache_never_counts_for_more_than_it_was_shrunk_to() -> None:
    limit, _ = made()
    limit.reported(80)
    limit.shrunk(30)
    limit.shrunk(60)
    assert limit.nbytes == 30
    limit.engine_lost()
    assert limit.nbytes == 0


def test_the_prompt_cache_gives_way_first(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b) as (pool, machine):
            await held(pool, "a")
            seen: list[StepOutput] = []
            pool.on_step = seen.append
            machine.cached = 130
            stepped = StepOutput("a", [], 0, active_bytes=190, cache_bytes=130)
            machine.engines[-1]._dispatch(stepped)
            assert seen == [stepped]
            assert pool.memory() == {
                "budget": 200,
                "used": 190,
                "kv_reserved": 0,
                "prompt_cache": 130,
                "lowered": 0,
            }
            await held(pool, "b")
            assert machine.log == ["load a", "shrink to 80", "load b"]
            assert (state(pool, "a"), pool.memory()["prompt_cache"]) == ("ready", 80)

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
            machine.engines[-1]._dispatch(stepped)
            assert machine.log[-1] == "shrink to 110"
            assert pool.memory()["prompt_cache"] == 110

    run(test)
