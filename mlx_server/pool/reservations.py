"""The memory reserved for the rows of requests: what they take now and what they may take."""

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


class ReservedMemory:
    """The memory of several reservations, without their models' weights.

    A batch pads every row to its longest. Rows grow, and when there is no more room all but the
    first can be preempted: so it is enough that each reservation could reach its end alone.
    """

    def __init__(self, granted: Iterable[Reservation] = ()) -> None:
        self._batches: dict[str, tuple[int, int]] = {}
        """The number of rows and the bytes of the longest, for each model."""
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
        rows, longest = self._batches.get(reservation.model, (0, 0))
        self._batches[reservation.model] = (
            rows + reservation.rows,
            max(longest, reservation.kv_bytes),
        )

    @property
    def _in_batches(self) -> int:
        return sum(rows * longest for rows, longest in self._batches.values())


def bytes_alone(reservation: Reservation) -> int:
    """The bytes that the reservation takes if there is no other."""
    reserved = ReservedMemory()
    reserved.take(reservation)
    return reserved.nbytes
