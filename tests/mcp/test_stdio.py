"""The transport over pipes."""

import asyncio
import sys
from collections.abc import Callable

import anyio
import pytest
import uvloop
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCNotification

from mlx_server.mcp.stdio import Read, _write_messages

SECONDS = 20.0


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_messages_to_a_server_that_has_ended_end_the_session(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(_write_to_an_ended_server(), SECONDS))


async def _write_to_an_ended_server() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "", stdin=asyncio.subprocess.PIPE
    )
    await process.wait()
    assert process.stdin
    while not process.stdin.is_closing():  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(0)
    into, read = anyio.create_memory_object_stream[Read](1)
    write, out_of = anyio.create_memory_object_stream[SessionMessage](1)
    async with into, read, write, out_of:
        note = JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized")
        await write.send(SessionMessage(note))
        await _write_messages(process.stdin, out_of, into)
        with pytest.raises(anyio.EndOfStream):
            read.receive_nowait()
