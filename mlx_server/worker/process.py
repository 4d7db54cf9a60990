"""The engine process: `python -m mlx_server.worker.process FD`. Its `WorkerArguments` are the first
frame on the socket; if the server has not sent them yet, it imports MLX meanwhile.

Its main thread owns MLX. One thread reads commands, so that the process exits with its server even
during a long step; another one sends heartbeats, which distinguish a long step from a dead process.
MLX is imported once these run: reading it from a cold disk is the longest step of a start.
"""

import gc
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

from mlx_server.engine import messages
from mlx_server.engine.messages import IDLE, IMPORTING, Ready
from mlx_server.engine.worker_arguments import WorkerArguments, decode_worker_arguments
from mlx_server.system import descriptors, logs
from mlx_server.system.process import keep_time_slices
from mlx_server.worker.ranks.leader import Leader
from mlx_server.worker.server_connection import (
    END,
    HeartbeatMonitor,
    Inbox,
    OwnInputs,
    ReportSender,
    leave,
    start_heartbeat,
)
from mlx_server.worker.unused_imports import left_out

SWITCH_SECONDS = 0.0005
"""Interval after which MLX's thread gets the GIL back from one that reads a vocabulary: a tenth of
Python's default."""


def _receive(connection: socket.socket, inbox: Inbox, patience: float) -> None:
    """patience: how long the engine may still write to disk when the server is gone."""
    try:
        with connection.makefile("rb") as stream:
            for payload in messages.payloads(stream):
                inbox.put(payload)
    finally:  # reading ends with an error if the server died without reading all reports
        inbox.put(END)
        time.sleep(patience)
        os._exit(0)


def _run(
    arguments: WorkerArguments, inputs: OwnInputs, sender: ReportSender, monitor: HeartbeatMonitor
) -> bool:
    """Returns whether the engine has ended in order."""
    leader = Leader(arguments.group, arguments, sender) if arguments.group else None
    with left_out():
        from mlx_server.worker.engine import engine_of, run_steps
    share, taken, send = leader.join(inputs) if leader else (None, inputs, sender.send)
    engine = engine_of(arguments, taken, share)
    monitor.doing = IDLE
    gc.freeze()  # keeps collections short, such as the one after an unload
    gc.enable()
    with suppress(ConnectionError):  # the server is gone
        # The heartbeat ends the longer patience for an import at once.
        sender.send(_ready(leader.recommended if leader else []), monitor.heartbeat())
        run_steps(engine, monitor, taken, send)
    if not engine.broken:
        engine.stop()
    return not engine.broken


def _ready(others: list[int]) -> Ready:
    """others: the recommended working sets of the group's other machines, where there is Metal."""
    from mlx_server.worker.kernels import recommended_bytes

    recommended = recommended_bytes()
    least = None if recommended is None else min([recommended, *others])
    return Ready(os.getpid(), gpu=recommended is not None, recommended_bytes=least)


def _arguments(connection: socket.socket) -> bytes:
    """Empty if the server has ended."""
    sent = select.poll()  # `select` takes no descriptor above 1023
    sent.register(connection, select.POLLIN)
    if not sent.poll(0):
        with left_out():
            import mlx_server.worker.engine  # noqa: F401
    try:
        header = connection.recv(messages.HEADER_BYTES, socket.MSG_WAITALL)
        return connection.recv(messages.length(header), socket.MSG_WAITALL) if header else b""
    except ConnectionError:
        return b""


def main() -> None:
    gc.disable()  # nothing that is imported is garbage
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure("warning", os.environ.get(logs.FORMAT_VARIABLE, "text"))
    descriptors.survive_mlx_lm()
    keep_time_slices()
    sys.setswitchinterval(SWITCH_SECONDS)
    connection = socket.socket(fileno=int(sys.argv[1]))
    if not (text := _arguments(connection)):
        leave(0)
    arguments = decode_worker_arguments(text)
    inbox: Inbox = queue.SimpleQueue()
    patience = messages.FLUSH_SECONDS if arguments.disk.most_bytes else 0.0
    receiving = (connection, inbox, patience)
    threading.Thread(target=_receive, args=receiving, daemon=True).start()
    sender, monitor = ReportSender(connection), HeartbeatMonitor()
    monitor.doing = IMPORTING
    start_heartbeat(monitor, sender)
    leave(0 if _run(arguments, OwnInputs(inbox), sender, monitor) else 1)


if __name__ == "__main__":
    main()
