"""Memory for the rows of requests: what they take now, and what one of them may come to take."""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

from mlx_server.pool.actions import Ticket


@dataclass(eq=False)
class Reservation:
    """Of one ticket, waiting or granted."""

    ticket: Ticket
    model: str
    rows: int
    kv_bytes: int
    """Of its longest row, now or soon."""
    most_kv_bytes: int
    """Of its longest row, at its end."""
    extra_bytes: int
    """Whatever else it needs, such as an adapter; it stays while its rows are preempted."""
    requested_at: float
    turn: tuple[int, int]
    """Reservations are served in this order."""
    waiting_since: int
    """When it began to wait, as a number of the policy's clock."""
    granted: int | None = None
    preempted: bool = False

    @property
    def at_its_end(self) -> "Reservation":
        grown = copy(self)
        grown.kv_bytes, grown.preempted = self.most_kv_bytes, False
        return grown


class ReservedMemory:
    """Memory for several, next to their models.

    A batch keeps every row as long as its longest. Rows grow, and when there is no more room all
    but the first can be preempted: so it is enough that each one could come to its end alone.
    """

    def __init__(self, granted: Iterable[Reservation] = ()) -> None:
        self._batches: dict[str, tuple[int, int]] = {}
        """Of each model, rows and the bytes of the longest."""
        self._extra_bytes = 0
        self._largest = 0
        """Of any of them, at its end and alone."""
        for each in granted:
            self._hold(each)
            if not each.preempted:
                self._run(each)

    @property
    def now(self) -> int:
        """Bytes that are in use, or soon will be."""
        return self._extra_bytes + self._in_batches

    @property
    def nbytes(self) -> int:
        """And those that are kept for one to come to its end."""
        return self._extra_bytes + max(self._in_batches, self._largest)

    @property
    def can_be_less(self) -> bool:
        """Whether preempting somebody lowers it."""
        return self._in_batches > self._largest

    def take(self, reservation: Reservation) -> None:
        """One that waits; if it was preempted, it is among the granted already."""
        if not reservation.preempted:
            self._hold(reservation)
        self._run(reservation)

    def more(self, reservation: Reservation) -> int:
        """What it would add to `nbytes`."""
        return self._with(reservation).nbytes - self.nbytes

    def more_now(self, reservation: Reservation) -> int:
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
    """What it takes if no other row is there."""
    reserved = ReservedMemory()
    reserved.take(reservation)
    return reserved.nbytes
