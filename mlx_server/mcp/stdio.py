"""A server that is a process of ours, over its stdin and stdout.

The SDK's own transport reads lines without end, leaves a server's children behind, and leaves the
server itself behind when we are killed.
"""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from mlx_server.errors import told
from mlx_server.mcp.errors import Gone, McpError
from mlx_server.mcp.limits import Limits
from mlx_server.mcp.streams import Meter, Streams

GUARD = Path(__file__).with_name("guard.py")
GONE_SECONDS = 5.0
"""The guard needs less than half of it."""
CHUNK = 64 << 10
UNREAD = 64
"""Messages to a server that does not read them, before whoever writes another one has to wait."""

log = logging.getLogger(__name__)

Read = SessionMessage | Exception


@asynccontextmanager
async def stdio(
    command: Sequence[str], environment: Mapping[str, str], limits: Limits
) -> AsyncIterator[Streams]:
    process, lifeline = await _started(command, environment)
    assert process.stdin
    assert process.stdout
    into, read = anyio.create_memory_object_stream[Read]()
    write, out_of = anyio.create_memory_object_stream[SessionMessage](UNREAD)
    try:
        async with into, read, write, out_of, anyio.create_task_group() as group:
            group.start_soon(_read, process.stdout, into, limits)
            group.start_soon(_write, process.stdin, out_of, into)
            yield read, write
            group.cancel_scope.cancel()
    finally:
        process.stdin.close()
        os.close(lifeline)
        with anyio.move_on_after(GONE_SECONDS, shield=True):
            await _drained(process.stdout)
            await process.wait()


async def _started(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[asyncio.subprocess.Process, int]:
    """And the end of the pipe that it lives as long as we hold."""
    theirs, ours = os.pipe()
    try:
        with anyio.CancelScope(shield=True):  # a guard that is killed halfway guards nothing
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(GUARD), str(theirs), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None if log.isEnabledFor(logging.DEBUG) else asyncio.subprocess.DEVNULL,
                env={**get_default_environment(), **environment},
                pass_fds=[theirs],
                start_new_session=True,  # Ctrl-C is for us
            )
    except (OSError, ValueError) as error:
        os.close(ours)
        raise McpError(f"It can't be started: {told(error)}.") from None
    finally:
        os.close(theirs)
    return process, ours


async def _read(
    stdout: asyncio.StreamReader, into: MemoryObjectSendStream[Read], limits: Limits
) -> None:
    meter = Meter(limits.session_bytes)
    async with into:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for line in _lines(stdout, meter, limits.message_bytes):
                with suppress(ValueError):  # something else than a message: nothing to us
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    await into.send(SessionMessage(message))


async def _lines(stdout: asyncio.StreamReader, meter: Meter, longest: int) -> AsyncIterator[bytes]:
    begun: list[bytes] = []
    size = 0
    while chunk := await stdout.read(CHUNK):
        meter.count(len(chunk))
        first, *others = chunk.split(b"\n")
        begun.append(first)
        size += len(first)
        if size > longest:
            raise Gone(f"It sent a message of more than {longest} bytes.")
        for other in others:
            yield b"".join(begun)
            begun, size = [other], len(other)


async def _write(
    stdin: asyncio.StreamWriter,
    out_of: MemoryObjectReceiveStream[SessionMessage],
    into: MemoryObjectSendStream[Read],
) -> None:
    with suppress(OSError):
        async for each in out_of:
            text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            stdin.write(text.encode() + b"\n")
            await stdin.drain()
        return
    await into.aclose()  # nobody reads there, so nobody is going to answer


async def _drained(stdout: asyncio.StreamReader) -> None:
    """A server whose output nobody takes can't come to its end."""
    while await stdout.read(CHUNK):
        pass
