"""The memory reserved for the rows of requests: what they take now and at most."""

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace

from mlx_server.pool.actions import Ticket


@dataclass(eq=False)
class Reservation:
    """The memory that one ticket, waiting or granted, needs."""

    ticket: Ticket
    model: str
    rows: int
    kv_bytes: int
    """The KV bytes reserved for the longest row at present."""
    most_kv_bytes: int
    """The KV bytes of the longest row at its end."""
    padding_bytes: int | None
    """The most KV bytes of padding for the model's rows; None: each is padded to the longest."""
    extra_bytes: int
    """The bytes of the adapter, which stays in memory while the rows are preempted."""
    requested_at: float
    turn: tuple[int, int]
    """The sort key of the order in which reservations are served."""
    waiting_since: int
    """The tick of the policy's clock at which it began to wait."""
    granted: int | None = None
    """The tick of the policy's clock at which it was granted."""
    preempted: bool = False
    begun: bool = False
    """Whether a row of it has been sent to the engine."""

    @property
    def in_use(self) -> "Reservation":
        """The reservation, without its rows' memory if the engine does not have them yet."""
        return self if self.begun else replace(self, preempted=True)

    @property
    def at_its_end(self) -> "Reservation":
        grown = copy(self)
        grown.kv_bytes, grown.preempted = self.most_kv_bytes, False
        return grown


@dataclass(frozen=True)
class _Batch:
    """The running rows of one model."""

    rows: int = 0
    longest: int = 0
    """The KV bytes of the longest row."""
    alone: int = 0
    """The KV bytes of all rows without padding."""
    padding: float = 0
    """The most KV bytes of padding."""

    def joined_by(self, more: Reservation) -> "_Batch":
        padding = math.inf if more.padding_bytes is None else more.padding_bytes
        return _Batch(
            self.rows + more.rows,
            max(self.longest, more.kv_bytes),
            self.alone + more.rows * more.kv_bytes,
            max(self.padding, padding),
        )

    @property
    def nbytes(self) -> int:
        return int(min(self.rows * self.longest, self.alone + self.padding))


class ReservedMemory:
    """The memory of several reservations, without their models' weights.

    The engine pads the rows of a group to the longest one, and splits groups whose padding would
    exceed what is reserved here. Rows grow; if memory runs short, all reservations but the first
    can be preempted. So it suffices to keep enough for any one of them to reach its end alone.
    """

    def __init__(self, granted: Iterable[Reservation] = ()) -> None:
        self._batches: dict[str, _Batch] = {}
        """The running rows, by model."""
        self._extra_bytes = 0
        self._largest = 0
        """The KV bytes at its end of the reservation that needs most, if it ran alone."""
        for each in granted:
            self._hold(each)
            if not each.preempted:
                self._run(each)

    @property
    def now(self) -> int:
        """The bytes of the running rows and of all adapters."""
        return self._extra_bytes + self._in_batches

    @property
    def nbytes(self) -> int:
        """The bytes that must be kept: those of `now`, or more so that any one reservation can
        reach its end."""
        return self._extra_bytes + max(self._in_batches, self._largest)

    @property
    def can_be_less(self) -> bool:
        """Whether preempting a reservation lowers `nbytes`."""
        return self._in_batches > self._largest

    def take(self, reservation: Reservation) -> None:
        """Adds a waiting reservation, or the rows of a preempted one, whose adapter and end are
        counted already."""
        if not reservation.preempted:
            self._hold(reservation)
        self._run(reservation)

    def more(self, reservation: Reservation) -> int:
        """The bytes that the reservation would add to `nbytes`."""
        return self._after(reservation).nbytes - self.nbytes

    def more_now(self, reservation: Reservation) -> int:
        """The bytes that the reservation would add to `now`."""
        return self._after(reservation).now - self.now

    def _after(self, reservation: Reservation) -> "ReservedMemory":
        both = copy(self)
        both._batches = dict(self._batches)
        both.take(reservation)
        return both

    def _hold(self, reservation: Reservation) -> None:
        self._extra_bytes += reservation.extra_bytes
        self._largest = max(self._largest, reservation.rows * reservation.most_kv_bytes)

    def _run(self, reservation: Reservation) -> None:
        batch = self._batches.get(reservation.model, _Batch())
        self._batches[reservation.model] = batch.joined_by(reservation)

    @property
    def _in_batches(self) -> int:
        return sum(batch.nbytes for batch in self._batches.values())


def bytes_alone(reservation: Reservation) -> int:
    """The bytes that the reservation needs if there is no other."""
    reserved = ReservedMemory()
    reserved.take(reservation)
    return reserved.nbytes
