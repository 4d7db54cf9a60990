"""Runs one MCP server over its own stdin and stdout: `guard.py LIFELINE_FD COMMAND ...`.

Nothing of the server outlives the lifeline, which breaks when our own process ends, however it
does. It also goes by itself when its stdin is closed; whatever it started goes with it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress

MARK = "MLX_SERVER_MCP_MARK"
"""In the environment of the server, so that also those of its processes are found that have left
its process group and lost their parents."""

GRACE_SECONDS = 0.35
SWEEPS = 3
"""A process may start another one while we look for them."""


def main() -> None:
    lifeline, command, mark = int(sys.argv[1]), sys.argv[2:], uuid.uuid4().hex
    try:
        server = subprocess.Popen(command, start_new_session=True, env={**os.environ, MARK: mark})
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # else the other side would not see the server close them
        os.dup2(nowhere, stream)
    threading.Thread(target=_end_with, args=(lifeline, server.pid), daemon=True).start()
    server.wait()
    _sweep(server.pid, mark)
    os._exit(0)


def _end_with(lifeline: int, group: int) -> None:
    os.read(lifeline, 1)
    for step in (signal.SIGTERM, signal.SIGKILL):
        time.sleep(GRACE_SECONDS)
        _signal(group, step)


def _sweep(group: int, mark: str) -> None:
    import psutil  # takes a moment, which the server's start need not wait for

    _signal(group, signal.SIGKILL)
    for _ in range(SWEEPS):
        left = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == mark:
                    left.append(process)
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
