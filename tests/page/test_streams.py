"""A client has a number of streams of the page; all of them end when the server stops."""

import asyncio

import pytest

from mlx_server import limits
from mlx_server.api.page.routes import PageStreams
from mlx_server.errors import Overloaded


def test_a_client_has_so_many_streams_and_others_have_theirs() -> None:
    streams, most = PageStreams(), limits.PAGE_STREAMS
    taken = [streams.take("me") for _ in range(most)]
    for place in taken:
        place.__enter__()
    with pytest.raises(Overloaded, match="close some of its tabs"), streams.take("me"):
        pass
    with streams.take("you"):
        pass
    taken[0].__exit__(None, None, None)
    with streams.take("me"):
        pass


def test_streams_end_when_the_server_stops() -> None:
    async def run() -> None:
        streams = PageStreams()
        waiting = asyncio.create_task(streams.pause(60))
        await asyncio.sleep(0)
        streams.end()
        assert not await waiting
        assert not await streams.pause(60)

    asyncio.run(run())
