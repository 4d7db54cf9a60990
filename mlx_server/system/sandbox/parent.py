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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

import psutil

from mlx_server.errors import Unavailable
from mlx_server.request_threads import check_wanted, client_of_request
from mlx_server.system.sandbox.child import LENGTH_BYTES

LOOK_SECONDS = 0.05
"""Interval at which a running request's memory, deadline and cancellation are checked."""

FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of a child that the system or a person has ended. Its own limits end it otherwise: too
much memory is an error of its allocations, and too much time another signal."""

START_SECONDS = 30.0
"""How long a child may take to start, as on a busy machine. It is no time of the first request."""

STARVED_SHARE = 0.25
"""A request whose time by the clock is over with less than this share of its processor time used
was not slow itself: the machine was too busy."""

ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "SYSTEMROOT")
"""The variables that a child inherits."""


class Stopped(Exception):
    """The request exceeded a limit. The message is a verb phrase that names it."""


class OutOfTime(Stopped):
    """The request exceeded its processor time, which also depends on what else the machine does."""


class _ChildLost(Exception):
    """The child has ended, or sent an invalid reply."""


@dataclass(frozen=True)
class Program:
    """The program of a child, run as `file MEMORY_BYTES LIFELINE` with a socket as its stdin. The
    lifeline is a pipe that breaks when this process ends, however it does."""

    file: str
    task: str
    """The process's work, for messages, such as "renders chat templates"."""
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
        try:
            self._lifeline, self._socket, self._process = _started(program)
        except OSError as error:
            raise program.unavailable(
                f"The process that {program.task} can't be started: "
                f"{error.strerror}. Try again in a moment."
            ) from None
        self._watched: psutil.Process | None = None
        self._serves = False
        self._used = self._used_before = 0.0
        """Seconds of processor time: of this request, and of all before it."""

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytearray, seconds: float) -> tuple[bytearray, bytearray]:
        """Send a request; return the reply and its payload. Raises Stopped if the child has ended,
        or the program's `unavailable` if that was not the request's fault.

        The request is cleared as soon as it is sent. `seconds` limits processor time, which the
        child enforces itself; four times as much wall-clock time is allowed.
        """
        self._await_start()
        self._used, self._used_before = 0.0, self._look(_processor_seconds)
        deadline = time.monotonic() + 4 * seconds + 1
        try:
            self._send(request, seconds)
            request.clear()
            return self._frame(deadline), self._frame(deadline)
        except TimeoutError:
            error = self._out_of_time(seconds)
            self.end()
            raise error from None
        except MemoryError:
            self.end()
            most = self._program.memory >> 20
            raise Stopped(f"needs more than {most} MiB of memory") from None
        except (OSError, _ChildLost):
            raise self._why_it_ended(seconds) from None
        except BaseException:
            self.end()
            raise

    def _await_start(self) -> None:
        try:
            if not self._serves:
                self._frame(time.monotonic() + START_SECONDS)
        except (OSError, MemoryError, _ChildLost):  # a TimeoutError is an OSError
            self.end()
            raise self._program.unavailable(
                f"The process that {self._program.task} did not start. Try again in a moment."
            ) from None
        except BaseException:
            self.end()
            raise
        self._serves = True

    def _send(self, packed: bytearray, seconds: float) -> None:
        self._socket.settimeout(4 * seconds + 1)
        self._socket.sendall(len(packed).to_bytes(LENGTH_BYTES))
        self._socket.sendall(packed)

    def _frame(self, deadline: float) -> bytearray:
        return self._received(int.from_bytes(self._received(LENGTH_BYTES, deadline)), deadline)

    def _received(self, size: int, deadline: float) -> bytearray:
        if size > self._program.largest:
            raise _ChildLost
        data, at = bytearray(size), 0
        self._socket.settimeout(LOOK_SECONDS)
        while at < size:
            try:
                read = self._socket.recv_into(memoryview(data)[at:])
            except TimeoutError:
                self._check_running(deadline)
                continue
            if not read:
                raise _ChildLost
            at += read
        return data

    def _check_running(self, deadline: float) -> None:
        check_wanted()
        if time.monotonic() > deadline:
            raise TimeoutError
        self._measure_time()
        if self._look(_memory) > self._program.memory + (64 << 20):
            raise MemoryError

    def _look(self, measure: Callable[[psutil.Process], float]) -> float:
        """A measure of the child; 0 if it has ended, so that the next read from it fails, or if no
        descriptor is free to look at it."""
        try:
            self._watched = self._watched or psutil.Process(self._process.pid)
            return measure(self._watched)
        except (psutil.Error, OSError):
            return 0.0

    def _measure_time(self) -> None:
        self._used = max(self._used, self._look(_processor_seconds) - self._used_before)

    def _out_of_time(self, seconds: float) -> Exception:
        """The error for a request whose time by the clock is over."""
        self._measure_time()
        if self._used >= seconds * STARVED_SHARE:
            return OutOfTime(_too_slow(seconds))
        return self._program.unavailable(
            f"The process that {self._program.task} did not get enough processor time: the machine "
            "is busy. Try again in a moment."
        )

    def _why_it_ended(self, seconds: float) -> Exception:
        self._measure_time()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        self.end()
        if code == -signal.SIGALRM:
            return self._out_of_time(seconds)
        if code == -signal.SIGPROF:
            return OutOfTime(_too_slow(seconds))
        if code in FROM_OUTSIDE:
            return self._program.unavailable(
                f"The process that {self._program.task} was ended. Try again in a moment."
            )
        return Stopped("ended its process")

    def end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._lifeline.close()


def _started(program: Program) -> tuple[BinaryIO, socket.socket, subprocess.Popen[bytes]]:
    """The child, and our ends of its lifeline and its socket."""
    with ExitStack() as theirs, ExitStack() as unless_it_starts:
        read, write = os.pipe()
        theirs.callback(os.close, read)
        lifeline = unless_it_starts.enter_context(os.fdopen(write, "wb"))
        ours, stdin = map(unless_it_starts.enter_context, socket.socketpair())
        theirs.enter_context(stdin)
        process = subprocess.Popen(
            [sys.executable, "-I", program.file, str(program.memory), str(read)],
            stdin=stdin.fileno(),
            pass_fds=(read,),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            # in a group of its own Ctrl-C does not reach it, and if the server dies while
            # the child is stopped, the kernel sends SIGHUP to the orphaned group
            process_group=0,
        )
        unless_it_starts.pop_all()
    return lifeline, ours, process


def child_environment() -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    # the setting returns the memory of large texts to the system
    return {**inherited, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def _memory(child: psutil.Process) -> float:
    return float(child.memory_info().rss)


def _processor_seconds(child: psutil.Process) -> float:
    times = child.cpu_times()
    return float(times.user + times.system)


def _too_slow(seconds: float) -> str:
    return f"takes more than {seconds} s of processor time"


class WarmProcesses:
    def __init__(
        self, program: Program, most: int, most_idle: int, most_each: int | None = None
    ) -> None:
        """most_each: how many of the processes one client may have; by default all."""
        self._program = program
        self._most_idle = most_idle
        self._idle: list[WarmProcess] = []
        self._lock = threading.Lock()
        self._most, self._most_each = most, most_each or most
        self._changed = threading.Condition()
        self._held = Counter[str]()
        """The processes in use, by client."""
        atexit.register(self.close)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.end()

    @contextmanager
    def one(self) -> Iterator[WarmProcess]:
        """A process for the block; waits for one if all are busy, or all that its client may
        have."""
        with self._place(client_of_request.get()):
            own = self._next()
            try:
                yield own
            finally:
                self._keep(own)

    @contextmanager
    def _place(self, client: str) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_free(client))
            self._held[client] += 1
        try:
            yield
        finally:
            with self._changed:
                self._held -= Counter([client])
                self._changed.notify_all()

    def _is_free(self, client: str) -> bool:
        return self._held.total() < self._most and self._held[client] < self._most_each

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
