"""The engine process's connection to its server: commands come in, reports and heartbeats go out.

Nothing here imports MLX: it works before and while that is imported.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from mlx_server.engine import messages
from mlx_server.engine.messages import GENERATING, Command, Heartbeat, Report
from mlx_server.system.process import thread_seconds

Inbox = queue.SimpleQueue[bytes]

WAKE = b""
"""A frame without a command: it wakes the main thread when a background task has finished."""

END = b"\xc1"
"""A frame that msgpack never makes: the server is gone."""


class Inputs(Protocol):
    @property
    def clock(self) -> Callable[[], float]:
        """Reads a clock, in seconds."""

    def is_done(self, task: Future[Any]) -> bool:
        """Whether a background task has ended."""

    def take(self, pause: float | None) -> list[Command]:
        """Returns all received commands; waits up to `pause` seconds for one, None waits for ever.

        Raises EOFError when the server is gone."""

    def wake(self) -> None:
        """Ends the waiting of `take`. Other threads call it."""


class OwnInputs:
    """The inputs of an engine process: commands come from the server."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def is_done(self, task: Future[Any]) -> bool:
        return task.done()

    def wake(self) -> None:
        self._inbox.put(WAKE)

    def take(self, pause: float | None) -> list[Command]:
        received = []
        if pause != 0:
            with suppress(queue.Empty):
                received.append(self._inbox.get(timeout=pause))
        while not self._inbox.empty():
            received.append(self._inbox.get())
        if END in received:
            raise EOFError
        frames = [frame for frame in received if frame != WAKE]
        return [command for frame in frames for command in messages.decode_commands(frame)]


HEARTBEAT_SECONDS = 0.5

FADE = 0.99
"""The factor by which each shorter step reduces the longest one: a step that compiled a kernel does
not make the server patient for good."""

REST_SECONDS = 60.0
"""After a rest of this length, weights may have been compressed or paged out. The step that brings
them back may take as long as one that compiles kernels. The rest is measured by the wall clock,
which continues while the machine sleeps."""

WAKE_SECONDS = 2.0
"""How far the wall clock may run ahead of the monotonic one between two heartbeats. Python's
monotonic clock stops while a machine sleeps, on a Mac (mach_absolute_time) and on Linux
(CLOCK_MONOTONIC): a larger lead means that the machine woke, and the step in progress has to fetch
its pages again. A clock that was set looks the same, and only makes the server more patient."""


class HeartbeatMonitor:
    """Measures the MLX thread's steps; another thread reads it."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        threads: Callable[[], Mapping[int, float]] = thread_seconds,
    ) -> None:
        """threads: the processor time of each thread; looked up in long steps only."""
        self._clock, self._wall, self._threads = clock, wall, threads
        self.doing = "starting"
        self._began: float | None = None
        """The start of the step in progress."""
        self._observed: float | None = None
        """The start of the step that the last heartbeat saw."""
        self._before: Mapping[int, float] = {}
        """The processor time of each thread when a second heartbeat saw that step."""
        self._longest = 0.0
        self._warm = False
        self._ended = wall()
        self._lead = wall() - clock()

    def step_begins(self, *, warm: bool, doing: str) -> None:
        self._warm = warm and self._wall() - self._ended < REST_SECONDS
        self.doing = doing
        self._began = self._clock()

    def step_ends(self) -> None:
        if self._began is not None and self._warm and self.doing == GENERATING:
            self._longest = max(FADE * self._longest, self._clock() - self._began)
        self._began = None
        self._ended = self._wall()

    def heartbeat(self) -> Heartbeat:
        lead = self._wall() - self._clock()
        woke, self._lead = lead - self._lead > WAKE_SECONDS, lead
        began = self._began
        if woke and began is not None:
            self._warm = False
            self._began = began = self._clock()
        longest = self._longest if self._warm else 0.0
        if began is None:
            return Heartbeat(0.0, longest, doing=self.doing)
        return Heartbeat(self._clock() - began, longest, self._processor_seconds(began), self.doing)

    def _processor_seconds(self, began: float) -> float:
        """Returns the processor time of the busiest thread in this step: MLX computes in threads of
        its own."""
        if began != self._observed:  # nearly all steps end before the next heartbeat
            self._observed, self._before = began, {}
            return 0.0
        now = self._threads()
        self._before = self._before or now
        return max(seconds - self._before.get(thread, 0.0) for thread, seconds in now.items())


class ReportSender:
    """Sends reports; two threads may use it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, *reports: Report) -> None:
        frame = messages.frame(messages.encode_reports(reports))
        with self._lock:
            self._connection.sendall(frame)


def start_heartbeat(monitor: HeartbeatMonitor, sender: ReportSender) -> None:
    threading.Thread(target=_send_heartbeats, args=(monitor, sender), daemon=True).start()


def _send_heartbeats(monitor: HeartbeatMonitor, sender: ReportSender) -> None:
    with suppress(OSError):  # the server is gone
        while True:
            sender.send(monitor.heartbeat())
            time.sleep(HEARTBEAT_SECONDS)


def leave(code: int) -> None:
    """Exits without the interpreter's cleanup, which would wait for a device that has failed."""
    os._exit(code)
