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
    beside: int
    """Whatever else it needs, such as an adapter; it stays while its rows are preempted."""
    since: float
    turn: tuple[int, int]
    """Reservations are served in this order."""
    came: int
    """When it began to wait, as a number of the policy's clock."""
    granted: int | None = None
    preempted: bool = False

    @property
    def at_its_end(self) -> "Reservation":
        grown = copy(self)
        grown.kv_bytes, grown.preempted = self.most_kv_bytes, False
        return grown


class Reserved:
    """Memory for several, next to their models.

    A batch keeps every row as long as its longest. Rows grow, and when there is no more room all
    but the first can be preempted: so it is enough that each one could come to its end alone.
    """

    def __init__(self, granted: Iterable[Reservation] = ()) -> None:
        self._batches: dict[str, tuple[int, int]] = {}
        """Of each model, rows and the bytes of the longest."""
        self._beside = 0
        self._largest = 0
        """Of any of them, at its end and alone."""
        for each in granted:
            self._hold(each)
            if not each.preempted:
                self._run(each)

    @property
    def now(self) -> int:
        """Bytes that are in use, or soon will be."""
        return self._beside + self._in_batches

    @property
    def nbytes(self) -> int:
        """And those that are kept for one to come to its end."""
        return self._beside + max(self._in_batches, self._largest)

    @property
    def can_be_less(self) -> bool:
        """Whether preempting somebody lowers it."""
        return self._in_batches > self._largest

    def take(self, asked: Reservation) -> None:
        """One that waits; if it was preempted, it is among the granted already."""
        if not asked.preempted:
            self._hold(asked)
        self._run(asked)

    def more(self, asked: Reservation) -> int:
        """What it would add to `nbytes`."""
        return self._with(asked).nbytes - self.nbytes

    def more_now(self, asked: Reservation) -> int:
        return self._with(asked).now - self.now

    def _with(self, asked: Reservation) -> "Reserved":
        both = copy(self)
        both._batches = dict(self._batches)
        both.take(asked)
        return both

    def _hold(self, each: Reservation) -> None:
        self._beside += each.beside
        self._largest = max(self._largest, each.rows * each.most_kv_bytes)

    def _run(self, each: Reservation) -> None:
        rows, longest = self._batches.get(each.model, (0, 0))
        self._batches[each.model] = rows + each.rows, max(longest, each.kv_bytes)

    @property
    def _in_batches(self) -> int:
        return sum(rows * longest for rows, longest in self._batches.values())


def alone(asked: Reservation) -> int:
    """What it takes if no other row is there."""
    reserved = Reserved()
    reserved.take(asked)
    return reserved.nbytes
