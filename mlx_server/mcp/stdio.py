"""The transport to a server that is a child process, over its stdin and stdout.

The SDK's own transport reads lines of any length. It leaves the children of a server running, and
the server itself too if mlx-server is killed.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from shutil import which
from socket import SHUT_WR, socket, socketpair

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client._transport import TransportStreams
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from mlx_server import limits
from mlx_server.errors import public_message
from mlx_server.mcp import guard
from mlx_server.mcp.http import MESSAGES
from mlx_server.mcp.limits import (
    ConnectionLost,
    McpError,
    Meter,
    NoProgram,
    ValueMeter,
    messages_meter,
)
from mlx_server.system.turns import turn

GONE_SECONDS = 5.0
"""How long the guard may take to end a server. It needs less than half of it."""
CHUNK = 64 << 10

UNREAD_MESSAGES = 64
"""Messages to a server that it has not read yet; a call waits no longer than `call_seconds`."""

log = logging.getLogger(__name__)

Read = SessionMessage | Exception


@asynccontextmanager
async def stdio_transport(
    command: Sequence[str], environment: Mapping[str, str]
) -> AsyncIterator[TransportStreams]:
    process, lifeline = await _started(command, environment)
    assert process.stdin
    assert process.stdout
    into, read = anyio.create_memory_object_stream[Read]()
    write, out_of = anyio.create_memory_object_stream[SessionMessage](UNREAD_MESSAGES)
    try:
        async with into, read, write, out_of, anyio.create_task_group() as group:
            group.start_soon(_read_messages, process.stdout, into)
            group.start_soon(_write_messages, process.stdin, out_of, into)
            yield read, write
            group.cancel_scope.cancel()
    finally:
        process.stdin.close()
        lifeline.shutdown(SHUT_WR)
        with lifeline, anyio.CancelScope(shield=True):
            await _wait_until_gone(process, process.stdout, lifeline)


async def _wait_until_gone(
    process: asyncio.subprocess.Process, stdout: asyncio.StreamReader, lifeline: socket
) -> None:
    """Waits until the server and its guard have ended."""
    with anyio.move_on_after(GONE_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(_drained, stdout)
            await anyio.wait_readable(lifeline)
            await process.wait()


async def _started(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[asyncio.subprocess.Process, socket]:
    """Starts the guard and the server. Returns the guard's process and this end of its lifeline;
    closing that ends the server."""
    env = {**get_default_environment(), **environment}
    if which(command[0], path=env.get("PATH")) is None:
        raise NoProgram(command[0])
    ours, theirs = socketpair()
    ours.setblocking(False)
    try:
        with anyio.CancelScope(shield=True):  # a guard that is killed at its start ends no server
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", guard.__file__, str(theirs.fileno()), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None if log.isEnabledFor(logging.DEBUG) else asyncio.subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C reaches only mlx-server
            )
    except (OSError, ValueError) as error:
        ours.close()
        raise McpError(f"The server can't be started: {public_message(error)}.") from None
    finally:
        theirs.close()
    return process, ours


async def _read_messages(stdout: asyncio.StreamReader, into: MemoryObjectSendStream[Read]) -> None:
    async with into:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for line in _lines(stdout):
                await turn()
                ValueMeter().count(line)
                with suppress(ValueError):  # lines that are not messages are ignored
                    message = MESSAGES.validate_json(line, by_name=False)
                    await into.send(SessionMessage(message))


async def _lines(stdout: asyncio.StreamReader) -> AsyncIterator[bytes]:
    begun: list[bytes] = []
    meter, longest = Meter(limits.MCP_SESSION_BYTES), limits.MCP_MESSAGE_BYTES
    messages = messages_meter()
    size = 0
    while chunk := await stdout.read(CHUNK):
        meter.count(len(chunk))
        first, *others = chunk.split(b"\n")
        begun.append(first)
        size += len(first)
        if size > longest:
            raise ConnectionLost(f"The server sent a message of more than {longest} bytes.")
        for other in others:
            messages.count(1)
            yield b"".join(begun)
            begun, size = [other], len(other)


async def _write_messages(
    stdin: asyncio.StreamWriter,
    out_of: MemoryObjectReceiveStream[SessionMessage],
    into: MemoryObjectSendStream[Read],
) -> None:
    with suppress(OSError):
        async for each in out_of:
            if stdin.is_closing():  # a write would be lost, or with uvloop a RuntimeError
                raise BrokenPipeError
            text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            stdin.write(text.encode() + b"\n")
            await stdin.drain()
        return
    await into.aclose()  # a server that reads no more will not answer either


async def _drained(stdout: asyncio.StreamReader) -> None:
    """Reads stdout to its end, since a server can't exit while its output pipe is full."""
    while await stdout.read(CHUNK):
        pass
