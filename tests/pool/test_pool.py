"""The pool as its owner sees it, and places for the answers of each client."""

import pytest

from mlx_server.errors import BadRequest, Overloaded
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from tests.pool.machine import WEIGHTS, Holding, advance, held, run, running, state, view


def test_a_full_queue_refuses_and_a_place_that_is_left_is_taken(a: ModelSpec) -> None:
    pool = Pool([a], PoolLimits(concurrency=2, queue=3))
    with pool.row_slot(1), pool.row_slot(3):
        assert pool.rows == 4
        with pytest.raises(Overloaded, match="4 answers") as caught, pool.row_slot(2):
            pass
        assert "Retry-After" in caught.value.headers
        with pool.row_slot(2, "another client"):
            assert pool.rows == 6
        assert pool.rows == 4
        with pool.row_slot(1):
            assert pool.rows == 5
    assert pool.rows == 0
    with pool.row_slot(5):
        assert pool.rows == 5


def test_more_rows_than_can_ever_fit_are_no_matter_of_waiting(a: ModelSpec) -> None:
    pool = Pool([a], PoolLimits(concurrency=2, queue=3))
    with (
        pytest.raises(BadRequest, match="asks for 6 answers; this server allows 5"),
        pool.row_slot(6),
    ):
        pass
    assert pool.rows == 0


def test_a_view_says_what_is_known(a: ModelSpec) -> None:
    async def test() -> None:
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

    run(test)
