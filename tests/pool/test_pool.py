"""The pool, and who finds room in its queue."""

from contextlib import ExitStack

import pytest

from mlx_server.errors import Overloaded
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.pool import Pool, RowSlots
from mlx_server.pool.prepare import ModelSpec
from tests.pool.machine import WEIGHTS, Holding, advance, held, run, running, state, view


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
