"""Keeps a Mac awake while it generates: `caffeinate` runs as long as there are rows."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Sequence

log = logging.getLogger("mlx_server")

LINGER_SECONDS = 30.0
"""The time to stay awake after the last row ends, since an agent's next request may follow."""


def keep_awake_command(platform: str = sys.platform) -> tuple[str, ...]:
    """The command, which ends with this process at the latest; empty on other systems."""
    if platform != "darwin":
        return ()
    return ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid()))


class AwakeState:
    """Whether the machine has to stay awake, from the number of active rows."""

    def __init__(self) -> None:
        self._rows = 0
        self._idle_since: float | None = None

    def count(self, rows: int, now: float) -> None:
        if self._rows and not rows:
            self._idle_since = now
        self._rows = rows

    def wanted(self, now: float) -> bool:
        return self._rows > 0 or now < (self.ends_at or now)

    @property
    def ends_at(self) -> float | None:
        """The time at which the machine may sleep again; None while rows are active or before the
        first."""
        if self._rows or self._idle_since is None:
            return None
        return self._idle_since + LINGER_SECONDS


class KeepAwake:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._state = AwakeState()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def count(self, rows: int) -> None:
        """Sets the number of active rows."""
        self._state.count(rows, asyncio.get_running_loop().time())
        self._follow()

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._end()

    def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if not self._state.wanted(loop.time()):
            self._end()
        elif self._process is None and self._command:
            self._begin()
        if (at := self._state.ends_at) is not None and self._process:
            self._timer = loop.call_at(at, self._follow)

    def _begin(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("the machine can't be kept awake: %s", error.strerror)
            self._command = ()

    def _end(self) -> None:
        if self._process:
            self._process.kill()  # it has nothing to clean up
            self._process.wait()
            self._process = None
