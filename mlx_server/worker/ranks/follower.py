"""A rank other than 0: `python -m mlx_server.worker.ranks.follower ARGUMENTS`, see `RankArguments`.

It reads the inputs of its steps from standard input and reports to rank 0 on standard output. It
ends when either of them does, even in the middle of a step.
"""

import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import IO

from mlx_server.engine import messages
from mlx_server.engine.worker_arguments import RankArguments, decode_rank_arguments
from mlx_server.errors import public_message
from mlx_server.system import descriptors, logs
from mlx_server.worker.ranks.link import (
    CUT,
    REPORT_BYTES,
    Input,
    Link,
    RankFailed,
    RankHeartbeat,
    RankReady,
    RankReport,
    RepeatedInputs,
    decode_input,
    encode_report,
    write_all,
)
from mlx_server.worker.server_connection import HEARTBEAT_SECONDS, HeartbeatMonitor, leave
from mlx_server.worker.unused_imports import left_out

log = logging.getLogger("mlx_server.engine")

SILENT_SECONDS = 30.0
"""Limit on rank 0's silence: its machine was cut off or sleeps. Its death is noticed at once."""

Recorded = queue.SimpleQueue[Input]


class _Reports:
    """Sends reports to rank 0; two threads may use it."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._lock = threading.Lock()

    def send(self, report: RankReport) -> None:
        frame = messages.frame(encode_report(report))
        with self._lock:
            write_all(self._output, frame)


class _Leader:
    """Records when rank 0 last sent something, and has the ring's connections, which lead to it."""

    def __init__(self) -> None:
        self._heard = time.monotonic()
        self.link: Link | None = None
        """None until the ranks have joined."""

    def read(self, inputs: IO[bytes], recorded: Recorded) -> None:
        try:
            self._read(inputs, recorded)
        except OSError:
            pass
        except Exception:  # for example where rank 0 runs another version
            log.exception("an input of rank 0 can't be read")
            leave(1)
        leave(0)

    def _read(self, inputs: IO[bytes], recorded: Recorded) -> None:
        """Returns when rank 0 has ended."""
        for payload in messages.payloads(inputs):
            self._heard = time.monotonic()
            if payload:
                recorded.put(decode_input(payload))

    def watch(self, reports: _Reports) -> None:
        with suppress(OSError):
            while time.monotonic() - self._heard < SILENT_SECONDS:
                reports.send(RankFailed(CUT) if self.link and self.link.is_cut else RankHeartbeat())
                time.sleep(HEARTBEAT_SECONDS)
        leave(1)


def _run(arguments: RankArguments, recorded: Recorded, reports: _Reports, leader: _Leader) -> str:
    """Returns why the rank has ended."""
    with left_out():
        from mlx_server.worker.engine import engine_of, run_steps
        from mlx_server.worker.kernels import recommended_bytes
        from mlx_server.worker.share import joined_share
    reports.send(RankReady(recommended_bytes()))
    recorded.get()
    share = joined_share(arguments.group, arguments.rank)
    leader.link = Link()
    inputs = RepeatedInputs(recorded)
    engine = engine_of(arguments.worker, inputs, share)
    gc.freeze()
    run_steps(engine, HeartbeatMonitor(), inputs, inputs.compare)
    return "can't go on: see its log"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure("warning", os.environ.get(logs.FORMAT_VARIABLE, "text"))
    descriptors.survive_mlx_lm()
    output = os.dup(1)
    os.dup2(2, 1)  # whatever prints goes to the log
    recorded: Recorded = queue.SimpleQueue()
    reports, leader = _Reports(output), _Leader()
    threading.Thread(target=leader.read, args=(sys.stdin.buffer, recorded), daemon=True).start()
    threading.Thread(target=leader.watch, args=(reports,), daemon=True).start()
    arguments = decode_rank_arguments(sys.argv[1])
    try:
        why = _run(arguments, recorded, reports, leader)
    except Exception as error:
        log.exception("rank %d failed", arguments.rank)
        why = public_message(error)[: REPORT_BYTES // 8]
    with suppress(OSError):
        reports.send(RankFailed(why))
    leave(1)


if __name__ == "__main__":
    main()
