"""The server's end of warm processes.

Processes are started on demand and kept; requests that do not overlap share one. A process that
exceeds a limit is killed, and the next request gets another.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from mlx_server.errors import Unavailable
from mlx_server.request_threads import check_wanted
from mlx_server.sandbox.child import LENGTH_BYTES

LOOK_SECONDS = 0.05
"""Interval at which a running request's memory, deadline and cancellation are checked."""

ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "SYSTEMROOT")
"""The variables that a child inherits."""


class Stopped(Exception):
    """The request exceeded a limit. The message is a verb phrase that names it."""


class TimedOut(Stopped):
    """The request took too much wall-clock time, perhaps because the machine was busy."""


class _ChildLost(Exception):
    """The child has ended, or sent an invalid reply."""


@dataclass(frozen=True)
class Program:
    """The program of a child, run as `file MEMORY_BYTES` with a socket as its stdin."""

    file: str
    task: str
    """What it does, for messages, such as "renders chat templates"."""
    memory: int
    """Memory limit in bytes."""
    largest: int
    """Size limit of a reply in bytes."""
    unavailable: type[Unavailable]
    """Raised if the child can't be started."""


class WarmProcess:
    """One child process, which one thread uses at a time."""

    def __init__(self, program: Program) -> None:
        self._program = program
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", program.file, str(program.memory)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                    # in a group of its own Ctrl-C does not reach it, and if the server dies while
                    # the child is stopped, the kernel sends SIGHUP to the orphaned group
                    process_group=0,
                )
            except OSError as error:
                ours.close()
                raise program.unavailable(
                    f"The process that {program.task} can't be started: "
                    f"{error.strerror}. Try again in a moment."
                ) from None
        self._socket = ours
        self._memory = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytearray, seconds: float) -> tuple[bytearray, bytearray]:
        """Send a request; return the reply and its payload. Raises Stopped if the child has ended.

        The request is cleared as soon as it is sent. `seconds` limits processor time, which the
        child enforces itself; four times as much wall-clock time is allowed.
        """
        deadline = time.monotonic() + 4 * seconds + 1
        try:
            self._send(request, seconds)
            request.clear()
            return self._frame(deadline), self._frame(deadline)
        except TimeoutError:
            self.end()
            raise TimedOut(_too_slow(seconds)) from None
        except MemoryError:
            self.end()
            raise Stopped(self._too_much()) from None
        except (OSError, _ChildLost):
            raise Stopped(self._why_it_ended(seconds)) from None
        except BaseException:
            self.end()
            raise

    def _send(self, packed: bytearray, seconds: float) -> None:
        self._socket.settimeout(4 * seconds + 1)
        self._socket.sendall(len(packed).to_bytes(LENGTH_BYTES))
        self._socket.sendall(packed)

    def _frame(self, deadline: float) -> bytearray:
        return self._received(int.from_bytes(self._received(LENGTH_BYTES, deadline)), deadline)

    def _received(self, size: int, deadline: float) -> bytearray:
        if size > self._program.largest:
            raise _ChildLost
        found, at = bytearray(size), 0
        self._socket.settimeout(LOOK_SECONDS)
        while at < size:
            try:
                read = self._socket.recv_into(memoryview(found)[at:])
            except TimeoutError:
                self._check_running(deadline)
                continue
            if not read:
                raise _ChildLost
            at += read
        return found

    def _check_running(self, deadline: float) -> None:
        check_wanted()
        if time.monotonic() > deadline:
            raise TimeoutError
        try:
            size = self._memory.memory_info().rss
        except psutil.Error:
            return  # the child has ended, so the next read fails
        if size > self._program.memory + (64 << 20):
            raise MemoryError

    def _why_it_ended(self, seconds: float) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        self.end()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return _too_slow(seconds)
        return self._too_much() if code == -signal.SIGKILL else "ended its process"

    def _too_much(self) -> str:
        return f"needs more than {self._program.memory >> 20} MiB of memory"

    def end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    # the setting returns the memory of large texts to the system
    return {**inherited, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def _too_slow(seconds: float) -> str:
    return f"takes more than {seconds} s of processor time"


class WarmProcesses:
    def __init__(self, program: Program, most: int, most_idle: int) -> None:
        self._program = program
        self._most_idle = most_idle
        self._idle: list[WarmProcess] = []
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(most)
        atexit.register(self.close)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.end()

    @contextmanager
    def one(self) -> Iterator[WarmProcess]:
        """A process for the block; waits for one if all are busy."""
        with self._places:
            own = self._next()
            try:
                yield own
            finally:
                self._keep(own)

    def _next(self) -> WarmProcess:
        with self._lock:
            while self._idle:
                own = self._idle.pop()
                if own.is_alive:
                    return own
                own.end()
        return WarmProcess(self._program)

    def _keep(self, own: WarmProcess) -> None:
        with self._lock:
            if own.is_alive and len(self._idle) < self._most_idle:
                self._idle.append(own)
                return
        own.end()
