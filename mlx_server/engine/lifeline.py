"""Ends the engine process with the server, however the server ends and whatever the engine does.

By itself an engine goes when its socket closes, but not while it is stopped or deadlocked, and a
Mac has no signal for a parent's death. So a shell of a megabyte waits for a line on a pipe that
only the server holds: its end without a line is the server's own.
"""

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress

SHELL = "/bin/sh"
SCRIPT = 'read -r line || kill -s KILL -- "-$1"'
"""The engine leads a process group of its own. A number that was used again for any other process
is hardly a group's."""

LET_GO_SECONDS = 0.5


class Lifeline:
    def __init__(self, guard: Process) -> None:
        self._guard = guard

    @classmethod
    async def tied(cls, group: int) -> "Lifeline":
        """To this process group."""
        guard = await asyncio.create_subprocess_exec(
            SHELL,
            *("-c", SCRIPT, "mlx-server-lifeline", str(group)),
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=DEVNULL,
            env={"PATH": os.defpath},
            # not to go with a Ctrl-C at which the server drains first
            start_new_session=True,
        )
        return cls(guard)

    async def let_go(self) -> None:
        """When the engine has ended."""
        assert self._guard.stdin
        with suppress(ConnectionError):
            self._guard.stdin.write(b"\n")
            await self._guard.stdin.drain()
        self._guard.stdin.close()
        try:
            async with asyncio.timeout(LET_GO_SECONDS):
                await self._guard.wait()
        except TimeoutError:
            self._guard.kill()
            await self._guard.wait()
