"""The engine gets a new limit on the prompt cache when it changes, and when it was exceeded."""

from typing import cast

from mlx_server.engine.client import EngineClient
from mlx_server.errors import EngineDied
from mlx_server.pool.cache_limit import CacheLimit


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
    return CacheLimit(lambda: cast(EngineClient, engine)), engine


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
