"""The granted reservations: which run, which are preempted, and the memory that they take."""

from collections.abc import Iterable

from mlx_server.pool.actions import Ticket
from mlx_server.pool.reservations import Reservation, ReservedMemory


class Granted:
    def __init__(self) -> None:
        self._reservations: dict[Ticket, Reservation] = {}

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._reservations

    def get(self, ticket: Ticket) -> Reservation | None:
        """The ticket's reservation; None if the ticket is void because the engine was lost."""
        return self._reservations.get(ticket)

    def add(self, reservation: Reservation, at: int) -> None:
        """at: the tick of the policy's clock, which counts requests and grants."""
        reservation.granted = at
        self._reservations[reservation.ticket] = reservation

    def end(self, ticket: Ticket) -> Reservation | None:
        return self._reservations.pop(ticket, None)

    def clear(self) -> None:
        self._reservations.clear()

    @property
    def reserved(self) -> ReservedMemory:
        return ReservedMemory(self._reservations.values())

    def reserved_with(self, waiting: Iterable[Reservation]) -> ReservedMemory:
        taken = self.reserved
        for each in waiting:
            taken.take(each)
        return taken

    @property
    def in_use(self) -> int:
        """The bytes of the reservations whose rows the engine has."""
        return ReservedMemory(each.in_use for each in self._reservations.values()).now

    @property
    def preempted(self) -> list[Reservation]:
        """The preempted reservations, in the order in which they are resumed."""
        preempted = (each for each in self._reservations.values() if each.preempted)
        return sorted(preempted, key=lambda each: each.turn)

    def preempt_last(self) -> Ticket:
        """Marks the running reservation whose turn is last as preempted, and returns its ticket."""
        running = (each for each in self._reservations.values() if not each.preempted)
        last = max(running, key=lambda each: each.turn)
        last.preempted = True
        return last.ticket

    def passed(self, earlier: Reservation) -> list[Reservation]:
        """The reservations of later turns that were granted while `earlier` waited."""
        granted = ((each, each.granted or 0) for each in self._reservations.values())
        return [
            each for each, at in granted if at > earlier.waiting_since and each.turn > earlier.turn
        ]
