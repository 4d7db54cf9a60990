"""Runs one MCP server over its own stdin and stdout: `guard.py LIFELINE_FD COMMAND ...`.

The MCP server and all processes that it started are ended when the lifeline breaks, which happens
however mlx-server's process ends, and when the MCP server exits after its stdin was closed. On
Linux the kernel helps: the MCP server dies with its guard, and orphaned processes become children
of the guard.

The MCP SDK's `terminate_posix_process_tree` reaches only the MCP server's process group, and only
while mlx-server lives: in a test two of three processes survived it, and none survives the guard.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

MARK = "MLX_SERVER_MCP_GUARD"
"""An environment variable of the MCP server, with its guard's pid. It identifies those of its
processes that have left its session and lost their parents, as browsers do on a Mac."""

GRACE_SECONDS = 0.35
SWEEPS = 3
"""The number of searches for remaining processes, since one may start another during a search."""

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
"""Option numbers of Linux's prctl."""


def main() -> None:
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    try:
        server = _start_server(command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        _report_and_exit(lifeline)
    _silence_stdio()
    threading.Thread(target=_end_with, args=(lifeline, server.pid), daemon=True).start()
    while os.wait()[0] != server.pid:  # others are orphans, adopted as a subreaper
        pass
    _sweep()
    _report_and_exit(lifeline)


def _report_and_exit(lifeline: int) -> NoReturn:
    """Sends a byte, which means that no process remains, and exits."""
    with suppress(OSError):
        os.write(lifeline, b".")
    os._exit(0)


def _start_server(command: list[str]) -> "subprocess.Popen[bytes]":
    """Starts the MCP server in the guard's session, by which its processes are found, but in its
    own process group."""
    prctl = _prctl()
    prctl(SET_CHILD_SUBREAPER, 1)
    return subprocess.Popen(
        command,
        process_group=0,
        env={**os.environ, MARK: str(os.getpid())},
        preexec_fn=lambda: prctl(SET_PDEATHSIG, signal.SIGKILL),
    )


def _prctl() -> Callable[[int, int], Any]:
    if sys.platform != "linux":
        return lambda option, value: None
    function = ctypes.CDLL(None).prctl
    return lambda option, value: function(option, value, 0, 0, 0)


def _silence_stdio() -> None:
    """Closes the guard's copies of stdin and stdout, so that the client sees when the server closes
    its own."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)


def _end_with(lifeline: int, group: int) -> None:
    os.read(lifeline, 1)
    for step in (signal.SIGTERM, signal.SIGKILL):
        time.sleep(GRACE_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, step)


def _sweep() -> None:
    """Kills the remaining processes of the MCP server, whose session the guard leads."""
    for _ in range(SWEEPS):
        remaining = list(_remaining())
        if not remaining:
            return
        for process in remaining:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _remaining() -> Iterator[int]:
    import psutil  # imported here since it would delay the start of the MCP server

    guard = os.getpid()
    ours = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if (
                process.pid != guard
                and process.status() != psutil.STATUS_ZOMBIE
                and (
                    process.pid in ours
                    or os.getsid(process.pid) == guard
                    or process.environ().get(MARK) == str(guard)
                )
            ):
                yield process.pid


if __name__ == "__main__":
    main()
