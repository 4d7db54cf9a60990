"""Who finds room in the queue, and who does not."""

from contextlib import ExitStack

import pytest

from mlx_server.errors import BadRequest, Overloaded
from mlx_server.pool.pool import RowSlots


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
    assert not places._taken_by


def test_programs_of_one_address_leave_room_for_others() -> None:
    places = RowSlots(80)
    with ExitStack() as on:
        assert taken(places, on, "127.0.0.1 0") == 80
        assert [taken(places, on, f"127.0.0.1 {at}") for at in range(1, 8)] == [11, *[0] * 6]
        assert taken(places, on, "192.0.2.7") >= 10
    with ExitStack() as on:
        assert taken(places, on, "192.0.2.7") == 80
        assert taken(places, on, "127.0.0.1 0") >= 16


def test_more_than_can_ever_fit_is_no_matter_of_waiting() -> None:
    with (
        pytest.raises(BadRequest, match="asks for 6 answers; this server allows 5"),
        RowSlots(5).take(6, "a"),
    ):
        pass


def test_what_is_given_back_is_there_for_all() -> None:
    places = RowSlots(4)
    with ExitStack() as on:
        assert taken(places, on, "a") == 4
    with ExitStack() as on:
        assert taken(places, on, "b") == 4
