"""What the engine process reports while it works: alive, doing what, and for how long.

Sent by a thread of its own from before MLX is imported. A beat is late only where one call keeps
the GIL, or where the system gives the process no time; `liveness` tells those from an end.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mlx_server.engine import messages
from mlx_server.engine.messages import GENERATING, Heartbeat, Report

HEARTBEAT_SECONDS = 0.5

FADE = 0.99
"""Of the longest step, what is left of it with each that is shorter: one that compiled a kernel
does not make the server patient for good."""

REST_SECONDS = 60.0
"""After so long without a step, weights may have been compressed or paged out, and the first step
brings them back. It may take as long as one that compiles kernels. By the wall clock, which goes
on while the machine sleeps."""

WAKE_SECONDS = 2.0
"""How far the wall clock may run ahead of the monotonic one between two beats. Python's monotonic
clock stands still while a machine sleeps, on a Mac (mach_absolute_time) and on Linux
(CLOCK_MONOTONIC): a longer lead is a wake, after which the step in progress has to fetch its pages
again. A clock that somebody sets looks the same, and costs nothing but patience."""


class HeartbeatMonitor:
    """How the MLX thread is doing, told from another one."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._wall, self._processor = clock, wall, processor
        self.doing = "starting"
        self._began: tuple[float, float] | None = None
        """Of the step in progress: by the clock and in the processor's time."""
        self._longest = 0.0
        self._warm = False
        self._ended = wall()
        self._lead = wall() - clock()

    def step_begins(self, *, warm: bool, doing: str) -> None:
        self._warm = warm and self._wall() - self._ended < REST_SECONDS
        self.doing = doing
        self._began = self._clock(), self._processor()

    def step_ends(self) -> None:
        if self._began is not None and self._warm and self.doing == GENERATING:
            self._longest = max(FADE * self._longest, self._clock() - self._began[0])
        self._began = None
        self._ended = self._wall()

    def heartbeat(self) -> Heartbeat:
        lead = self._wall() - self._clock()
        woke, self._lead = lead - self._lead > WAKE_SECONDS, lead
        began = self._began
        if woke and began is not None:
            self._warm = False
            self._began = began = self._clock(), self._processor()
        if began is None:
            return Heartbeat(0.0, self._longest if self._warm else 0.0, doing=self.doing)
        return Heartbeat(
            self._clock() - began[0],
            self._longest if self._warm else 0.0,
            self._processor() - began[1],
            self.doing,
        )


class ReportSender:
    """Sends reports; two threads use it."""

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
    """Without an interpreter's orderly end, which would wait for a device that answers no more."""
    os._exit(code)
