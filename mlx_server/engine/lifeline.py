"""Ends the engine process with the server, even if the server is killed or the engine is stuck.

An engine exits when its socket closes, but not while it is stopped or deadlocked, and macOS has no
signal for a parent's death. So a small shell waits for a line on a pipe that only the server holds:
if the pipe closes without a line, the server has died and the shell kills the engine.
"""

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress

SHELL = "/bin/sh"
SCRIPT = 'read -r line || kill -s KILL -- "-$1"'
"""Kills the engine's process group: a process number that the system has reused for some other
process is unlikely to be a group's number too."""

RELEASE_SECONDS = 0.5


class Lifeline:
    def __init__(self, guard: Process) -> None:
        self._guard = guard

    @classmethod
    async def start(cls, group: int) -> "Lifeline":
        """Starts a lifeline that kills this process group."""
        guard = await asyncio.create_subprocess_exec(
            SHELL,
            *("-c", SCRIPT, "mlx-server-lifeline", str(group)),
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=DEVNULL,
            env={"PATH": os.defpath},
            # Ctrl-C must not end it: the server drains first.
            start_new_session=True,
        )
        return cls(guard)

    async def release(self) -> None:
        """Releases the lifeline once the engine has ended."""
        assert self._guard.stdin
        if not self._guard.stdin.is_closing():  # as it is if the shell was killed
            with suppress(ConnectionError):
                self._guard.stdin.write(b"\n")
                await self._guard.stdin.drain()
            self._guard.stdin.close()
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._guard.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):  # it may have ended just now
                self._guard.kill()
            await self._guard.wait()
