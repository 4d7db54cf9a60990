"""Runs a command on a host: here, or over ssh.

What comes back was written by another machine: its size and time are bounded, and it is only shown
and compared.
"""

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from mlx_server.engine.rank_group import RankGroup

SSH = (
    "ssh",
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5"),
    *("-o", "LogLevel=ERROR", "-o", "ForwardAgent=no", "-T"),
)
"""The ssh command: it asks nothing, accepts no unknown key, and gives up on a host that is
silent."""

MOST_BYTES = 256 << 10
"""The limit on each output stream."""

SHOWN_CHARACTERS = 200

KILL_SECONDS = 5.0
"""How long a process that was killed may keep its output open."""


@dataclass(frozen=True)
class Answer:
    status: int | None
    """The exit status; None if the command did not end by itself."""
    out: bytes = b""
    err: bytes = b""
    cut: Literal["", "no ssh", "slow", "large"] = ""
    """Why the command did not end by itself; empty if it did."""

    @property
    def last_line(self) -> str:
        """The last line of its error output, fit to be shown."""
        lines = self.err.decode(errors="replace").split("\n")
        return printable(next((line for line in reversed(lines) if line.strip()), ""))


def python_of(group: RankGroup) -> str:
    """The interpreter of the other machines."""
    return group.python or sys.executable


def printable(text: str) -> str:
    shown = "".join(char if char.isprintable() else "?" for char in text.strip())
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 3] + "..."


async def run_on(
    group: RankGroup, rank: int, arguments: Sequence[str], stdin: bytes, seconds: float
) -> Answer:
    """Runs the Python of a rank's host. Rank 0 is on this machine, as the server will be.

    It leaves no process here. What runs on another machine needs limits of its own.
    """
    host = group.hosts[rank]
    is_here = host.is_local or rank == 0
    python = sys.executable if is_here else python_of(group)
    command = ["env", *(f"{name}={value}" for name, value in group.variables), python, *arguments]
    line = command if is_here else [*SSH, host.ssh, f"exec {shlex.join(command)}"]
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *line, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError:
        return Answer(None, cut="no ssh")
    try:
        async with asyncio.timeout(seconds):
            return await _answer(process, stdin)
    except TimeoutError:
        return Answer(None, cut="slow")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Waits for a process that was killed. In Python 3.11 `wait` returns only after its output has
    been read to the end, which a process of another session may keep open."""
    assert process.stdout
    assert process.stderr
    with suppress(TimeoutError):
        async with asyncio.timeout(KILL_SECONDS):
            await asyncio.gather(
                _discarded(process.stdout), _discarded(process.stderr), process.wait()
            )


async def _discarded(stream: asyncio.StreamReader) -> None:
    while await stream.read(64 << 10):
        pass


async def _answer(process: asyncio.subprocess.Process, stdin: bytes) -> Answer:
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdin.write(stdin)
    too_large = False
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_sent(process.stdin))
            out = group.create_task(_read_output(process.stdout))
            err = group.create_task(_read_output(process.stderr))
    except* _TooLarge:
        too_large = True
    if too_large:
        return Answer(None, cut="large")
    return Answer(await process.wait(), out.result(), err.result())


class _TooLarge(Exception):
    pass


async def _sent(stdin: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


async def _read_output(stream: asyncio.StreamReader) -> bytes:
    found = b""
    while piece := await stream.read(64 << 10):
        found += piece
        if len(found) > MOST_BYTES:
            raise _TooLarge
    return found
