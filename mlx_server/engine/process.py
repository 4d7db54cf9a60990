"""The engine process: `python -m mlx_server.engine.process SOCKET_FD CONCURRENCY CACHE_BYTES`.

Its main thread owns MLX. One thread reads commands, so that the process goes with its server even
in a long step; another one beats, so that a long step is told from a dead process.
"""

import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import mlx.core as mx

from mlx_server import logs
from mlx_server.engine import messages
from mlx_server.engine.messages import Beat, Command, Ready, Report
from mlx_server.engine.worker import Engine

BEAT_SECONDS = 0.5

SWITCH_SECONDS = 0.0005
"""That MLX's thread waits for one that reads a vocabulary: a tenth of what is usual."""

Inbox = queue.SimpleQueue[bytes]

WAKE = b""
"""No command: something that the engine waits for is there."""


class Heart:
    """Tells from a thread of its own how the MLX thread is doing."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._longest = 0.0
        self._warm = False

    def step_begins(self, *, warm: bool) -> None:
        self._warm = warm
        self._began = time.monotonic()

    def step_ends(self) -> None:
        if self._began is not None:
            self._longest = max(self._longest, time.monotonic() - self._began)
        self._began = None

    def beat(self) -> Beat:
        began = self._began
        seconds = time.monotonic() - began if began is not None else 0.0
        return Beat(seconds, self._longest if self._warm else 0.0)


def serve(engine: Engine, heart: Heart, inbox: Inbox, send: Callable[..., None]) -> None:
    """Commands as they come, a step, one frame of reports; sleeps while there is nothing to do."""
    while True:
        commands = _take(inbox, engine.pause)
        reports = [report for command in commands for report in engine.handle(command)]
        heart.step_begins(warm=engine.warm)
        reports += engine.step()
        heart.step_ends()
        if reports:
            send(*reports)


class Line:
    """Sends reports; two threads use it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, *reports: Report) -> None:
        frame = messages.frame(messages.encode_reports(reports))
        with self._lock:
            self._connection.sendall(frame)


def _beat(heart: Heart, line: Line) -> None:
    with suppress(ConnectionError):  # the server is gone
        while True:
            line.send(heart.beat())
            time.sleep(BEAT_SECONDS)


def _take(inbox: Inbox, pause: float | None) -> list[Command]:
    """All commands that are there; waits for one as long as `pause`, None being for ever."""
    taken = []
    if pause != 0:
        with suppress(queue.Empty):
            taken.append(inbox.get(timeout=pause))
    while not inbox.empty():
        taken.append(inbox.get())
    return [messages.decode_command(frame) for frame in taken if frame != WAKE]


def _receive(connection: socket.socket, inbox: Inbox) -> None:
    try:
        with connection.makefile("rb") as stream:
            while len(header := stream.read(messages.HEADER_BYTES)) == messages.HEADER_BYTES:
                inbox.put(stream.read(messages.length(header)))
    finally:  # a server that went with reports unread ends the reading with an error
        os._exit(0)


def _recommended_bytes() -> int | None:
    if not mx.metal.is_available():
        return None
    return int(mx.device_info()["max_recommended_working_set_size"])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure("warning", os.environ.get(logs.FORMAT_VARIABLE, "text"))
    sys.setswitchinterval(SWITCH_SECONDS)
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    line, heart = Line(connection), Heart()
    engine = Engine(
        concurrency=int(sys.argv[2]),
        cache_bytes=int(sys.argv[3]),
        wake=partial(inbox.put, WAKE),
    )
    gc.freeze()  # so that a collection, as after an unload, takes no time from streams
    with suppress(ConnectionError):  # the server is gone
        line.send(Ready(os.getpid(), mx.metal.is_available(), _recommended_bytes()))
        threading.Thread(target=_beat, args=(heart, line), daemon=True).start()
        serve(engine, heart, inbox, line.send)


if __name__ == "__main__":
    main()
