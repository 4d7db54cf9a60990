"""The engine process.

`python -m mlx_server.worker.process FD CONCURRENCY CACHE_BYTES WIRED PREFILL_SHARE LONGEST_GAP`.

Its main thread owns MLX. One thread reads commands, so that the process goes with its server even
in a long step; another one beats, so that a long step is told from a dead process. MLX is imported
when those run: reading it from a cold disk is the longest step of a start.
"""

import gc
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from mlx_server.engine import messages
from mlx_server.engine.messages import IDLE, IMPORTING, Command, Ready, Schedule
from mlx_server.system import descriptors, logs
from mlx_server.worker.heartbeat import HeartbeatMonitor, ReportSender, leave, start_heartbeat

if TYPE_CHECKING:
    from mlx_server.worker.worker import Engine

SWITCH_SECONDS = 0.0005
"""That MLX's thread waits for one that reads a vocabulary: a tenth of what is usual."""

Inbox = queue.SimpleQueue[bytes]

WAKE = b""
"""No command: something that the engine waits for is there."""


def serve(
    engine: "Engine", heart: HeartbeatMonitor, inbox: Inbox, send: Callable[..., None]
) -> None:
    """Commands as they come, a step, one frame of reports; sleeps while there is nothing to do.

    Returns when the GPU has failed for good.
    """
    while not engine.broken:
        heart.doing = engine.doing
        commands = _take(inbox, engine.pause)
        heart.step_begins(warm=not commands and engine.warm, doing=engine.doing)
        # an unload frees as much as a machine holds, which may take seconds
        reports = [report for command in commands for report in engine.handle(command)]
        if commands:
            heart.step_begins(warm=engine.warm, doing=engine.doing)
        reports += engine.step()
        heart.step_ends()
        if reports:
            send(*reports)


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


def _engine(inbox: Inbox) -> "Engine":
    from mlx_server.worker.worker import Engine

    return Engine(
        concurrency=int(sys.argv[2]),
        cache_bytes=int(sys.argv[3]),
        wired=sys.argv[4],
        schedule=Schedule(float(sys.argv[5]), float(sys.argv[6])),
        wake=partial(inbox.put, WAKE),
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
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    line, heart = ReportSender(connection), HeartbeatMonitor()
    heart.doing = IMPORTING
    start_heartbeat(heart, line)
    engine = _engine(inbox)
    heart.doing = IDLE
    gc.freeze()  # so that a collection, as after an unload, takes no time from streams
    with suppress(ConnectionError):  # the server is gone
        line.send(
            _ready(), heart.heartbeat()
        )  # a deadlock before the next beat is none of importing
        serve(engine, heart, inbox, line.send)
        leave(1)


if __name__ == "__main__":
    main()
