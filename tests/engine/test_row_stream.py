"""A request takes its reports at its own pace, and then its error."""

import asyncio

import pytest

from mlx_server.engine.messages import Admitted, Logprobs, Prefilled, Token
from mlx_server.engine.row_stream import ITEM_BYTES, Item, RowStream
from mlx_server.errors import EngineDied


def test_what_has_arrived_is_taken_at_once_and_in_order() -> None:
    async def test() -> None:
        stream = RowStream()
        items: list[Item] = [Admitted(1), Prefilled(1, 0), Token(1, 7)]
        for item in items:
            stream.put(item)
        assert stream.unread == 3 * ITEM_BYTES
        assert await stream.take() == items
        assert stream.unread == 0

    asyncio.run(test())


def test_log_probabilities_count_by_their_number() -> None:
    stream = RowStream()
    stream.put(Token(1, 7, logprobs=Logprobs(-0.1, [(7, -0.1), (8, -2.0)])))
    assert stream.unread == 4 * ITEM_BYTES


def test_an_error_comes_after_the_items_and_each_time_as_a_copy() -> None:
    async def test() -> None:
        stream, error = RowStream(), EngineDied("gone")
        stream.put(Admitted(1))
        stream.fail(error)
        assert await stream.take() == [Admitted(1)]
        for _ in range(2):
            with pytest.raises(EngineDied, match="gone") as raised:
                await stream.take()
            assert raised.value is not error

    asyncio.run(test())


def test_a_paused_request_goes_on_when_it_has_taken_all() -> None:
    async def test() -> None:
        unpaused: list[RowStream] = []
        stream = RowStream(unpaused.append)
        stream.put(Admitted(1))
        await stream.take()
        assert unpaused == []
        stream.is_paused = True
        stream.put(Admitted(1))
        await stream.take()
        assert unpaused == [stream]

    asyncio.run(test())
