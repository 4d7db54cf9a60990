"""The memory reserved for the rows of requests: what they take now and what they may take."""

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
    """KV bytes of the longest row, now or soon."""
    most_kv_bytes: int
    """KV bytes of the longest row at its end."""
    padding_bytes: int | None
    """KV bytes by which the model's rows are padded at most; None: each to the longest."""
    extra_bytes: int
    """Bytes of anything else, such as an adapter; they stay while the rows are preempted."""
    requested_at: float
    turn: tuple[int, int]
    """The sort key by which reservations are served."""
    waiting_since: int
    """The tick of the policy's clock at which it began to wait."""
    granted: int | None = None
    """The tick of the policy's clock at which it was granted."""
    preempted: bool = False
    begun: bool = False
    """Whether the engine has had any of its rows."""

    @property
    def in_use(self) -> "Reservation":
        """The same, without the memory of rows that the engine does not have yet."""
        return self if self.begun else replace(self, preempted=True)

    @property
    def at_its_end(self) -> "Reservation":
        grown = copy(self)
        grown.kv_bytes, grown.preempted = self.most_kv_bytes, False
        return grown


@dataclass(frozen=True)
class _Batch:
    """The rows of a model."""

    rows: int = 0
    longest: int = 0
    """KV bytes of the longest row."""
    alone: int = 0
    """KV bytes of all rows if none is padded."""
    padding: float = 0
    """KV bytes by which the rows are padded at most."""

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

    The engine pads rows to the longest of their group, and makes more groups where that would take
    more than the padding that is reserved here. Rows grow, and when there is no more room all but
    the first can be preempted: so it is enough that each reservation could reach its end alone.
    """

    def __init__(self, granted: Iterable[Reservation] = ()) -> None:
        self._batches: dict[str, _Batch] = {}
        """The rows of each model."""
        self._extra_bytes = 0
        self._largest = 0
        """The bytes of the largest reservation at its end, if it were alone."""
        for each in granted:
            self._hold(each)
            if not each.preempted:
                self._run(each)

    @property
    def now(self) -> int:
        """The bytes that are in use or soon will be."""
        return self._extra_bytes + self._in_batches

    @property
    def nbytes(self) -> int:
        """The bytes in use, and those kept so that any one reservation can reach its end."""
        return self._extra_bytes + max(self._in_batches, self._largest)

    @property
    def can_be_less(self) -> bool:
        """Whether preempting a reservation lowers `nbytes`."""
        return self._in_batches > self._largest

    def take(self, reservation: Reservation) -> None:
        """Adds a waiting reservation; a preempted one is counted among the granted already."""
        if not reservation.preempted:
            self._hold(reservation)
        self._run(reservation)

    def more(self, reservation: Reservation) -> int:
        """The bytes that the reservation would add to `nbytes`."""
        return self._with(reservation).nbytes - self.nbytes

    def more_now(self, reservation: Reservation) -> int:
        """The bytes that the reservation would add to `now`."""
        return self._with(reservation).now - self.now

    def _with(self, reservation: Reservation) -> "ReservedMemory":
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
    """The bytes that the reservation takes if there is no other."""
    reserved = ReservedMemory()
    reserved.take(reservation)
    return reserved.nbytes
