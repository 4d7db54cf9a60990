"""The process of one engine: how it is started, stopped and tied to the server's life."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cache

from mlx_server.engine.messages import FLUSH_SECONDS, frame
from mlx_server.engine.worker_arguments import RankGroup, WorkerArguments, encode_arguments

SHELL = "/bin/sh"
SCRIPT = 'read -r line || kill -s KILL -- "-$1"'
"""Kills the engine's process group: a process number that the system has reused for some other
process is unlikely to be a group's number too."""

RELEASE_SECONDS = 0.5


class Lifeline:
    """Ends the engine process with the server, even if the server is killed or the engine is stuck.

    An engine exits when its socket closes, but not while it is stopped or deadlocked, and macOS has
    no signal for a parent's death. So a small shell waits for a line on a pipe that only the server
    holds: if the pipe closes without a line, the server has died and the shell kills the engine.
    """

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


MODULE = "mlx_server.worker.process"

STOP_SECONDS = 0.5
"""How long an engine may take to end, in addition to FLUSH_SECONDS if it has a disk to write to."""

SOCKET_BUFFER_BYTES = 8 << 10
"""Size of each of the two buffers of reports, at the sender and at the receiver: they bound what a
row still sends after PauseRows."""

MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
"""Makes glibc return large blocks to the system as soon as they are freed. By default it raises
its mmap threshold over time, and a small live block keeps the freed heap below it resident."""


class EngineProcess:
    """It gets its arguments over the socket of its commands, and imports MLX until then: so it may
    be started while its server is not ready yet. It ends if the server does."""

    def __init__(self, group: RankGroup | None = None) -> None:
        self._ours, theirs = _socket_pair()
        with theirs, ExitStack() as unless_it_starts:
            unless_it_starts.enter_context(self._ours)
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=process_environment(group),
                # A separate process group: Ctrl-C must reach only the server, which drains first.
                start_new_session=True,
            )
            unless_it_starts.pop_all()
        self._lifeline: Lifeline | None = None
        self._stop_seconds = STOP_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    async def begin(self, arguments: WorkerArguments) -> socket.socket:
        """Returns the server's end of the socket."""
        self._stop_seconds += FLUSH_SECONDS if arguments.disk.most_bytes else 0.0
        with ExitStack() as unless_it_is_tied:
            unless_it_is_tied.enter_context(self._ours)
            with suppress(ConnectionError):  # it has ended, which the end of its reports will show
                self._ours.sendall(frame(encode_arguments(arguments)))
            self._lifeline = await Lifeline.start(self._process.pid)
            unless_it_is_tied.pop_all()
        return self._ours

    async def stop(self) -> None:
        """Waits for the process to end, which it does when its socket is closed; then kills it."""
        try:
            # wait_for may swallow the cancellation of its caller on Python 3.11.
            async with asyncio.timeout(self._stop_seconds):
                await asyncio.to_thread(self._process.wait)
        except TimeoutError:
            self.kill()
            await asyncio.to_thread(self._process.wait)
        self.kill()  # the other ranks on this machine, which end by themselves if they can
        if self._lifeline:
            await self._lifeline.release()
            self._lifeline = None

    def kill(self) -> None:
        """Kills the process, and the ranks of its group that run on this machine."""
        with suppress(ProcessLookupError, PermissionError):  # they may have ended just now
            os.killpg(self._process.pid, signal.SIGKILL)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the server's end of the socket and the engine process's end."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    return ours, theirs


def process_environment(group: RankGroup | None = None) -> dict[str, str]:
    """Returns the process's environment; it preloads a fast BLAS if one is installed."""
    environment = {**MALLOC, **os.environ, **_group_variables(group)}
    if blas := fast_blas():
        preloaded = environment.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = f"{preloaded}:{blas}" if preloaded else blas
    return environment


def _group_variables(group: RankGroup | None) -> Mapping[str, str]:
    """Returns variables that make all ranks hash strings alike, so that their sets have the same
    order."""
    if group is None:
        return {}
    return {**dict(group.variables), "PYTHONHASHSEED": str(secrets.randbelow(2**32 - 1) + 1)}


LIBRARIES = ("libblis.so.4", "libopenblas.so.0")
"""The libraries to look for, fastest first."""


@cache
def fast_blas() -> str | None:
    """Returns the library to put into LD_PRELOAD before MLX is loaded, None if there is none."""
    if sys.platform != "linux":
        return None
    return next(filter(_has_cblas, LIBRARIES), None)


def _has_cblas(library: str) -> bool:
    # This runs in a child, because these libraries start threads when they are loaded.
    trial = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).cblas_sgemm"
    run = subprocess.run([sys.executable, "-ISc", trial, library], capture_output=True)
    return run.returncode == 0
