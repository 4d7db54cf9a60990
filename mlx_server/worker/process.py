"""The engine process.

`python -m mlx_server.worker.process FD CONCURRENCY CACHE_BYTES WIRED PREFILL_SHARE LONGEST_GAP
DISK_BYTES FOLDER`, where FOLDER has the prompt cache's files.

Its main thread owns MLX. One thread reads commands, so that the process exits with its server even
during a long step; another one sends heartbeats, which distinguish a long step from a dead process.
MLX is imported once these run: reading it from a cold disk is the longest step of a start.
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
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_server.engine import messages
from mlx_server.engine.messages import IDLE, IMPORTING, Command, Ready, Schedule
from mlx_server.system import descriptors, logs
from mlx_server.worker.heartbeat import HeartbeatMonitor, ReportSender, leave, start_heartbeat
from mlx_server.worker.unused_imports import left_out

if TYPE_CHECKING:
    from mlx_server.worker.worker import Engine

SWITCH_SECONDS = 0.0005
"""Interval after which MLX's thread gets the GIL back from one that reads a vocabulary: a tenth of
Python's default."""

Inbox = queue.SimpleQueue[bytes]

WAKE = b""
"""A frame without a command: it wakes the main thread when a background task has finished."""

END = b"\xc1"
"""A frame that msgpack never makes: the server is gone."""


def serve(
    engine: "Engine", monitor: HeartbeatMonitor, inbox: Inbox, send: Callable[..., None]
) -> None:
    """Repeats: handles the commands, takes a step, sends one frame of reports; sleeps while idle.

    Returns when the GPU has failed for good, or the server is gone.
    """
    while not engine.broken:
        monitor.doing = engine.doing
        try:
            commands = _take(inbox, engine.pause)
        except EOFError:
            return
        monitor.step_begins(warm=not commands and engine.warm, doing=engine.doing)
        # An unload may free most of the machine's memory, which takes seconds.
        reports = [report for command in commands for report in engine.handle(command)]
        if commands:
            monitor.step_begins(warm=engine.warm, doing=engine.doing)
        reports += engine.step()
        monitor.step_ends()
        if reports:
            send(*reports)


def _take(inbox: Inbox, pause: float | None) -> list[Command]:
    """Returns all received commands; waits up to `pause` seconds for one, None waits for ever."""
    taken = []
    if pause != 0:
        with suppress(queue.Empty):
            taken.append(inbox.get(timeout=pause))
    while not inbox.empty():
        taken.append(inbox.get())
    if END in taken:
        raise EOFError
    return [messages.decode_command(frame) for frame in taken if frame != WAKE]


def _receive(connection: socket.socket, inbox: Inbox, patience: float) -> None:
    """patience: how long the engine may still write to disk when the server is gone."""
    try:
        with connection.makefile("rb") as stream:
            while len(header := stream.read(messages.HEADER_BYTES)) == messages.HEADER_BYTES:
                inbox.put(stream.read(messages.length(header)))
    finally:  # reading ends with an error if the server died without reading all reports
        inbox.put(END)
        time.sleep(patience)
        os._exit(0)


def _engine(inbox: Inbox) -> "Engine":
    with left_out():
        from mlx_server.worker.prefill.disk_tier import opened
        from mlx_server.worker.worker import Engine

    disk = opened(Path(sys.argv[8]), int(sys.argv[7])) if int(sys.argv[7]) else None
    return Engine(
        concurrency=int(sys.argv[2]),
        cache_bytes=int(sys.argv[3]),
        wired=sys.argv[4],
        schedule=Schedule(float(sys.argv[5]), float(sys.argv[6])),
        wake=partial(inbox.put, WAKE),
        disk=disk,
    )


def _ready() -> Ready:
    import mlx.core as mx

    if not mx.metal.is_available():
        return Ready(os.getpid(), metal=False, recommended_bytes=None)
    recommended = int(mx.device_info()["max_recommended_working_set_size"])
    return Ready(os.getpid(), metal=True, recommended_bytes=recommended)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure("warning", os.environ.get(logs.FORMAT_VARIABLE, "text"))
    descriptors.survive_mlx_lm()
    sys.setswitchinterval(SWITCH_SECONDS)
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: Inbox = queue.SimpleQueue()
    patience = messages.FLUSH_SECONDS if int(sys.argv[7]) else 0.0
    receiving = (connection, inbox, patience)
    threading.Thread(target=_receive, args=receiving, daemon=True).start()
    sender, monitor = ReportSender(connection), HeartbeatMonitor()
    monitor.doing = IMPORTING
    start_heartbeat(monitor, sender)
    engine = _engine(inbox)
    monitor.doing = IDLE
    gc.freeze()  # keeps collections short, such as the one after an unload
    with suppress(ConnectionError):  # the server is gone
        # The heartbeat ends the longer patience for an import at once.
        sender.send(_ready(), monitor.heartbeat())
        serve(engine, monitor, inbox, sender.send)
    if engine.broken:
        leave(1)
    engine.stop()
    leave(0)


if __name__ == "__main__":
    main()
