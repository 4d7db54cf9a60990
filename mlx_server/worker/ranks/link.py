"""What connects the ranks of a group. Rank 0 records the inputs of its steps, the others repeat
them and compare digests of their tokens; each watches its connections of MLX's ring.

Nothing here imports MLX, which the processes of a group import once they can report.
"""

import os
import queue
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from mlx_server.engine.messages import Command, Report, StepOutput
from mlx_server.worker.server_connection import OwnInputs

CHECK_STEPS = 16
"""Steps with tokens between two comparisons."""


class TokenDigest:
    """A running digest of the tokens of all steps, in their order."""

    steps = value = 0

    def add(self, reports: Sequence[Report]) -> bool:
        """Returns whether the digest is to be compared now."""
        due = False
        for report in reports:
            if isinstance(report, StepOutput) and report.tokens:
                drawn = [(token.row, token.id, token.finish) for token in report.tokens]
                self.value = crc32(msgspec.msgpack.encode(drawn), self.value)
                self.steps += 1
                due = due or self.steps % CHECK_STEPS == 0
        return due


CUT = "can't reach the next rank any more: check the cable"
"""Why a rank is lost: its connections have ended."""


class RankReady(msgspec.Struct, tag=True):
    """MLX is imported; the rank waits for the first input to join the group."""

    recommended_bytes: int | None
    """The GPU's memory that programs may use; None without a GPU."""


class RankHeartbeat(msgspec.Struct, tag=True):
    """The rank is alive."""


class RankFailed(msgspec.Struct, tag=True):
    why: str


REPORT_BYTES = 64 << 10
"""The limit on a report. What a shell prints is far above it: four letters read as a length."""

RankReport = RankReady | RankHeartbeat | RankFailed

encode_report = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(RankReport).decode


Input = list[Command] | float | bool | int
"""The commands of a step, a reading of the clock, whether a task has ended, or a digest."""

T = TypeVar("T", list[Command], float, bool, int)

encode_input = msgspec.msgpack.Encoder().encode
decode_input = msgspec.msgpack.Decoder(list[Command] | float | bool | int).decode


def write_all(descriptor: int, frame: bytes) -> None:
    while frame:
        frame = frame[os.write(descriptor, frame) :]


class Diverged(Exception):
    """This rank has not taken the same steps as rank 0, or has computed other tokens."""


class RecordedInputs:
    """The inputs of rank 0: each is sent to the other ranks as soon as it is read."""

    def __init__(self, own: OwnInputs, record: Callable[[bytes], None]) -> None:
        self._own, self._record = own, record
        self._digest = TokenDigest()

    def clock(self) -> float:
        now = self._own.clock()
        self._record(encode_input(now))
        return now

    def is_done(self, task: Future[Any]) -> bool:
        done = self._own.is_done(task)
        self._record(encode_input(done))
        return done

    def wake(self) -> None:
        self._own.wake()

    def take(self, pause: float | None) -> list[Command]:
        commands = self._own.take(pause)
        self._record(encode_input(commands))
        return commands

    def compare(self, reports: Sequence[Report]) -> None:
        """Has the other ranks compare the tokens of the steps so far, now and then."""
        if self._digest.add(reports):
            self._record(encode_input(self._digest.value))


class RepeatedInputs:
    """The inputs of a rank other than 0: those that rank 0 recorded."""

    def __init__(self, inputs: "queue.SimpleQueue[Input]") -> None:
        self._inputs = inputs
        self._digest = TokenDigest()

    def clock(self) -> float:
        return self._next(float)

    def is_done(self, task: Future[Any]) -> bool:
        done = self._next(bool)
        if done:
            wait([task])
        return done

    def wake(self) -> None:
        pass

    def take(self, pause: float | None) -> list[Command]:
        return self._next(list)

    def compare(self, *reports: Report) -> None:
        """Receives the engine's reports, as the server does on rank 0. It only compares their
        tokens."""
        if self._digest.add(reports) and self._next(int) != self._digest.value:
            raise Diverged("has computed other tokens than rank 0")

    def _next(self, kind: type[T]) -> T:
        value = self._inputs.get()
        if type(value) is not kind:
            raise Diverged(f"rank 0 read {type(value).__name__} where this rank read {kind}")
        return value


IDLE_SECONDS, PROBE_SECONDS, PROBES = 3, 1, 5
"""A connection is probed after so many idle seconds and ends after so many lost probes. A host that
is only slow answers them, since its kernel does."""

LOST_SECONDS = IDLE_SECONDS + PROBES * PROBE_SECONDS
"""Limit on data that is not acknowledged, in seconds: the same as for idle connections, which are
probed."""

TCP_RXT_CONNDROPTIME = 0x80
"""The number of macOS's socket option for LOST_SECONDS (netinet/tcp.h)."""


class Link:
    """This rank's connections of the ring, which MLX opens: a link that is cut is noticed within
    seconds. JACCL has none, and its cut is noticed as a step that takes too long.

    TCP itself would give up after many minutes. Where it does, MLX may raise RuntimeError, but a
    step may also wait for ever: so the connections are watched from another thread.
    """

    def __init__(self) -> None:
        """Takes every TCP connection of the process: the engine has no others."""
        self._connections = list(_connections())
        for connection in self._connections:
            for level, option, value in _options():
                connection.setsockopt(level, option, value)

    @property
    def is_cut(self) -> bool:
        return any(not _has_peer(connection) for connection in self._connections)

    def close(self) -> None:
        """Closes its own descriptors; the connections go on."""
        for connection in self._connections:
            connection.close()


def _options() -> Iterator[tuple[int, int, int]]:
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    yield socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS
    yield socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES
    if sys.platform == "darwin":
        yield socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, IDLE_SECONDS
        yield socket.IPPROTO_TCP, TCP_RXT_CONNDROPTIME, LOST_SECONDS
    else:
        yield socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS
        yield socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS


def _connections() -> Iterator[socket.socket]:
    """Yields the process's TCP connections. Each gets a descriptor of its own, which stays open
    when MLX closes its one."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # the descriptor of the listing is closed by now
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                connection = socket.socket(fileno=os.dup(descriptor))
                if connection.family in (socket.AF_INET, socket.AF_INET6) and _has_peer(connection):
                    yield connection
                else:
                    connection.close()


def _has_peer(connection: socket.socket) -> bool:
    """Whether TCP has not given up. A connection that the other side has closed still has a
    peer."""
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
