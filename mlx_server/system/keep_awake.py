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


class KeepAwake:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Ends the process a while after the last row."""

    def count(self, rows: int) -> None:
        """Takes the number of active rows."""
        if rows:
            self._stop_timer()
            if self._process is None and self._command:
                self._begin()
        elif self._process and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self.stop)

    def stop(self) -> None:
        self._stop_timer()
        if self._process:
            self._process.kill()  # it has nothing to clean up
            self._process.wait()
            self._process = None

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

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
