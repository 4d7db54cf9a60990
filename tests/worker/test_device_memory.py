"""MLX's limits, and memory that is given back."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_server.worker.memory import MOST_FREED, limit_memory, release_memory

GB = 1 << 30


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(GB), mx.set_cache_limit(GB)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.mark.skipif(mx.metal.is_available(), reason="with Metal, the limit includes them")
@pytest.mark.parametrize(
    ("limit", "freed"),
    [(0, 0), (99, 0), (GB, GB // 100), (100 * GB, MOST_FREED), (1 << 50, MOST_FREED)],
)
def test_freed_buffers_are_a_share_of_the_limit_and_never_many(limit: int, freed: int) -> None:
    limit_memory(limit)
    assert mx.set_cache_limit(GB) == freed
    assert mx.set_memory_limit(GB) == limit


def test_freed_buffers_are_given_back() -> None:
    mx.eval(mx.zeros(1 << 20))
    release_memory()
    assert mx.get_cache_memory() == 0
