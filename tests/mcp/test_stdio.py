"""The transport over pipes."""

import asyncio
import sys

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCNotification

from mlx_server.mcp.stdio import Read, _write_messages
from tests.event_loops import NewLoop, on_each_loop, run_on

SECONDS = 20.0


@on_each_loop
def test_messages_to_a_server_that_has_ended_end_the_session(new_loop: NewLoop) -> None:
    run_on(new_loop, _write_to_an_ended_server(), SECONDS)


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
