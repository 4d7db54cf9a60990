"""Commands of one turn leave in one message."""

import asyncio
import socket

import pytest

from mlx_server.engine import messages
from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import LimitCache

pytestmark = pytest.mark.live


def test_commands_of_one_turn_arrive_together() -> None:
    asyncio.run(_commands_in_two_turns())


async def _commands_in_two_turns() -> None:
    engine = EngineClient()
    ours, theirs = socket.socketpair()
    _, engine._writer = await asyncio.open_connection(sock=ours)
    theirs.setblocking(False)
    for _ in range(2):
        for number in range(3):
            engine.limit_cache(number)
        await asyncio.sleep(0)
    with theirs.makefile("rb") as stream:
        for _ in range(2):
            length = messages.length(stream.read(messages.HEADER_BYTES))
            commands = messages.decode_commands(stream.read(length))
            assert commands == [LimitCache(number) for number in range(3)]
    theirs.close()
    engine._writer.close()
    await engine._writer.wait_closed()
