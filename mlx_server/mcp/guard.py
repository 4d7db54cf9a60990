"""Runs one MCP server over its own stdin and stdout: `guard.py LIFELINE_FD MARK COMMAND ...`.

Nothing of the server outlives the lifeline, which breaks when our own process ends, however it
does. It also goes by itself when its stdin is closed; whatever it started goes with it.

The server could kill or stop its guard. So there are two of them, and each ends everything when the
other one is gone or does not act; our own process does the same when it sees that a guard was
killed. On Linux the kernel helps: a server dies with the guard that started it, and processes
that lost their parents become the guard's.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any, NoReturn

MARK = "MLX_SERVER_MCP_MARK"
"""In the environment of the server, so that also those of its processes are found that have left
its session and lost their parents."""

GRACE_SECONDS = 0.35
SECOND_SECONDS = 2.0
"""After which the second guard no longer waits for the first one to end everything."""
SWEEPS = 3
"""A process may start another one while we look for them."""

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
"""Of Linux's prctl."""


def main() -> None:
    lifeline, mark, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    first, pulse = os.getpid(), os.pipe()
    if not (second := os.fork()):
        _silence_stdio()
        os.close(pulse[1])
        _run_second_guard(lifeline, pulse[0], first, mark)
        os._exit(0)
    try:
        server = _started(command, mark)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        _report_and_exit(lifeline, second)
    _silence_stdio()
    threading.Thread(target=_end_with, args=(lifeline, server.pid), daemon=True).start()
    while os.wait()[0] not in (server.pid, second):  # others are orphans that became ours
        pass
    sweep(first, mark, spared={first, second})
    _report_and_exit(lifeline, second)


def _report_and_exit(lifeline: int, second: int) -> NoReturn:
    """A byte says that nothing is left; guards that were killed can't send it."""
    with suppress(ProcessLookupError):
        os.kill(second, signal.SIGKILL)
    with suppress(OSError):
        os.write(lifeline, b".")
    os._exit(0)


def _started(command: list[str], mark: str) -> "subprocess.Popen[bytes]":
    """In our session, by which its processes can be found, and a group of its own."""
    prctl = _prctl()
    prctl(SET_CHILD_SUBREAPER, 1)
    return subprocess.Popen(
        command,
        process_group=0,
        env={**os.environ, MARK: mark},
        preexec_fn=lambda: prctl(SET_PDEATHSIG, signal.SIGKILL),
    )


def _prctl() -> Callable[[int, int], Any]:
    if sys.platform != "linux":
        return lambda option, value: None
    function = ctypes.CDLL(None).prctl
    return lambda option, value: function(option, value, 0, 0, 0)


def _silence_stdio() -> None:
    """Else the other side would not see the server close its stdin or stdout."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)


def _end_with(lifeline: int, group: int) -> None:
    os.read(lifeline, 1)
    for step in (signal.SIGTERM, signal.SIGKILL):
        time.sleep(GRACE_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, step)


def _run_second_guard(lifeline: int, pulse: int, first: int, mark: str) -> None:
    """The second guard, which the first one ends when it is done."""
    select.select([lifeline, pulse], [], [])
    select.select([pulse], [], [], SECOND_SECONDS)
    sweep(first, mark, spared={first, os.getpid()})
    with suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)  # it was stopped


def sweep(session: int, mark: str, spared: Collection[int] = ()) -> None:
    """Ends all that is left of a server, whose first guard leads the session."""
    for _ in range(SWEEPS):
        left = [process for process in _left(session, mark) if process not in spared]
        if not left:
            return
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _left(session: int, mark: str) -> Iterator[int]:
    import psutil  # takes a moment, which the server's start need not wait for

    ours = set[int]()
    with suppress(psutil.Error):
        ours |= {child.pid for child in psutil.Process(session).children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and (
                process.pid in ours
                or os.getsid(process.pid) == session
                or process.environ().get(MARK) == mark
            ):
                yield process.pid


if __name__ == "__main__":
    main()
