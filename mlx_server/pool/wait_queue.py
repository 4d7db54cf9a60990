"""The reservations that must go on waiting, and what is kept for them until they are served."""

from mlx_server.pool.granted import Granted
from mlx_server.pool.reservations import Reservation, ReservedMemory
from mlx_server.pool.resident_models import ResidentModels


class WaitQueue:
    """It is built anew, in order, each time that requests are served."""

    def __init__(self, resident: ResidentModels, granted: Granted, budget: int) -> None:
        self._resident = resident
        self._granted = granted
        self._budget = budget
        self._reservations: list[Reservation] = []
        self._promised: list[Reservation] = []
        self._promised_weights = 0
        """Bytes of the models that the promised reservations will load."""
        self.models: set[str] = set()
        self.stuck = False
        """Whether a reservation can only be served after leases have ended."""

    @property
    def promised(self) -> int:
        """The bytes set aside for the queue. A grant past it may take memory that was kept for any
        one row to reach its end, and that the queue would have shared: then they become more."""
        caches = self._granted.reserved_with(self._promised).nbytes - self._granted.reserved.nbytes
        return caches + self._promised_weights

    def more(self, reservation: Reservation) -> int:
        """The bytes that its rows would add to what is granted and what the queue will need."""
        return self._granted.reserved_with(self._reservations).more(reservation)

    def needs(self, reservation: Reservation) -> int:
        """The bytes of `more`, and those of its model unless they are counted already."""
        return self.more(reservation) + self._weights(reservation)

    def let_pass(self, reservation: Reservation) -> bool:
        """Whether it may be granted before all that wait in the queue."""
        return all(self._lets_pass(earlier, reservation) for earlier in self._reservations)

    def _lets_pass(self, earlier: Reservation, reservation: Reservation) -> bool:
        if earlier.preempted:
            return False
        passing = [
            reservation.at_its_end,
            *(each.at_its_end for each in self._granted.passed(earlier)),
        ]
        present = {m.id for m in self._resident if m.must_stay} | {p.model for p in passing}
        present |= {id for id in self.models if self._resident[id].facts.pinned}
        taken, weights = ReservedMemory(passing), sum(self._resident[id].nbytes for id in present)
        needs = taken.more(earlier)
        needs += 0 if earlier.model in present else self._resident[earlier.model].nbytes
        return weights + taken.nbytes + needs <= self._budget

    def add(self, reservation: Reservation) -> None:
        self._reservations.append(reservation)
        self.models.add(reservation.model)

    def promise(self, reservation: Reservation) -> None:
        """Sets memory aside for a reservation that is about to be added."""
        self._promised.append(reservation)
        self._promised_weights += self._weights(reservation)

    def _weights(self, reservation: Reservation) -> int:
        """The bytes of its model if that is neither in memory nor loaded for an earlier one."""
        model = self._resident[reservation.model]
        return 0 if model.is_present or reservation.model in self.models else model.nbytes
