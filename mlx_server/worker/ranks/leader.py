"""Rank 0's side of a group: it starts the other ranks, sends them its inputs and watches them."""

import os
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING

import msgspec

from mlx_server.engine import messages
from mlx_server.engine.messages import Report
from mlx_server.engine.worker_arguments import (
    RankArguments,
    RankGroup,
    RankHost,
    WorkerArguments,
    encode_arguments,
)
from mlx_server.errors import public_message
from mlx_server.worker.ranks.link import (
    CUT,
    REPORT_BYTES,
    Link,
    RankFailed,
    RankHeartbeat,
    RankReady,
    RankReport,
    RecordedInputs,
    decode_report,
    encode_input,
    write_all,
)
from mlx_server.worker.server_connection import HEARTBEAT_SECONDS, OwnInputs, ReportSender, leave

if TYPE_CHECKING:
    from mlx_server.worker.share import Share

SILENT_SECONDS = 6.0
"""Limit on a rank's silence. It reports twice a second from a thread of its own."""

START_SECONDS = 60.0
"""Limit on a rank's silence until the ranks have joined: ssh connects, MLX is read from a cold
disk, and while MLX connects the ranks no other thread runs in any of them."""

MODULE = "mlx_server.worker.ranks.follower"

HEARTBEAT = messages.frame(b"")
"""A frame without an input, which only shows that rank 0 is alive."""


class _Rank:
    """The process of one other rank."""

    def __init__(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        self.number = number
        self.process = process
        self.ready = threading.Event()
        self.recommended_bytes: int | None = None
        self.heard = time.monotonic()
        self._sending = threading.Lock()

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout
        return self.process.stdout

    @property
    def silence(self) -> float:
        """Seconds since its last report."""
        return time.monotonic() - self.heard

    def send(self, frame: bytes) -> None:
        assert self.process.stdin
        with self._sending, suppress(OSError):  # its death is noticed where its reports are read
            write_all(self.process.stdin.fileno(), frame)

    def send_heartbeat(self) -> None:
        """Sends a heartbeat, unless the rank has not read what was sent before."""
        assert self.process.stdin
        if self._sending.acquire(blocking=False):
            try:
                is_free = select.select([], [self.process.stdin], [], 0)[1]
            finally:
                self._sending.release()
            if is_free:
                self.send(HEARTBEAT)


class Leader:
    def __init__(self, group: RankGroup, worker: WorkerArguments, sender: ReportSender) -> None:
        """Starts the other ranks. Their loss ends this process, after a report to the server."""
        self._group = group
        self._sender = sender
        self._losing = threading.Lock()
        self._silent_seconds = START_SECONDS
        self._link: Link | None = None
        self._ranks = [
            _Rank(number, _started(group, worker, number)) for number in range(1, len(group.hosts))
        ]
        for rank in self._ranks:
            threading.Thread(target=self._read_reports, args=(rank,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def recommended(self) -> list[int]:
        """The recommended bytes of the other machines that have a GPU."""
        return [rank.recommended_bytes for rank in self._ranks if rank.recommended_bytes]

    def join(self, own: OwnInputs) -> tuple["Share", RecordedInputs, Callable[..., None]]:
        """Joins the group once all ranks are ready. Returns this rank's share, the inputs of its
        steps and where the steps' reports go."""
        from mlx_server.worker.share import joined_share

        for rank in self._ranks:
            rank.ready.wait()
        self._record(encode_input(True))
        try:
            share = joined_share(self._group, 0)
        except Exception as error:
            self._lose(0, f"can't connect to the others: {public_message(error)}")
        self._link = Link()
        for rank in self._ranks:
            rank.heard = time.monotonic()
        self._silent_seconds = SILENT_SECONDS
        inputs = RecordedInputs(own, self._record)

        def send(*reports: Report) -> None:
            inputs.compare(reports)
            self._sender.send(*reports)

        return share, inputs, send

    def _record(self, recorded: bytes) -> None:
        frame = messages.frame(recorded)
        for rank in self._ranks:
            rank.send(frame)

    def _read_reports(self, rank: _Rank) -> None:
        try:
            for payload in messages.payloads(rank.output, REPORT_BYTES):
                rank.heard = time.monotonic()
                self._dispatch(rank, decode_report(payload))
        except OSError:
            pass
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._lose(
                rank.number,
                "sends what is no report: make its shell print nothing where there is no terminal",
            )
        code = rank.process.wait()
        self._lose(rank.number, f"ended (exit code {code})")

    def _dispatch(self, rank: _Rank, report: RankReport) -> None:
        match report:
            case RankReady(recommended_bytes=recommended):
                rank.recommended_bytes = recommended
                rank.ready.set()
            case RankFailed(why):
                self._lose(rank.number, why)
            case RankHeartbeat():
                pass

    def _watch(self) -> None:
        while True:
            if self._link and self._link.is_cut:
                self._lose(0, CUT)
            for rank in self._ranks:
                if rank.silence > self._silent_seconds:
                    self._lose(rank.number, "stopped answering")
                rank.send_heartbeat()
            time.sleep(HEARTBEAT_SECONDS)

    def _lose(self, number: int, why: str) -> None:
        self._losing.acquire()  # never released: this process ends
        with suppress(OSError):
            self._sender.send(messages.RankLost(number, self._group.hosts[number].ssh, why))
        for rank in self._ranks:
            rank.process.kill()
        leave(1)


def _started(group: RankGroup, worker: WorkerArguments, number: int) -> "subprocess.Popen[bytes]":
    arguments = RankArguments(number, group, worker)
    host, text = group.hosts[number], encode_arguments(arguments).decode()
    return subprocess.Popen(
        rank_command(group, host, text),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | dict(group.variables),
    )


def rank_command(group: RankGroup, host: RankHost, arguments: str) -> list[str]:
    if host.is_local:
        return [sys.executable, "-m", MODULE, arguments]
    wanted = {**dict(group.variables), "PYTHONHASHSEED": os.environ["PYTHONHASHSEED"]}
    variables = [f"{name}={value}" for name, value in wanted.items()]
    command = ["env", *variables, group.python or sys.executable, "-m", MODULE, arguments]
    options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    return ["ssh", *options, host.ssh, f"exec {shlex.join(command)}"]
