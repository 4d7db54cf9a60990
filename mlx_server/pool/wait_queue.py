"""The reservations that have to wait, and the memory that is kept for them."""

from mlx_server.pool.granted import Granted
from mlx_server.pool.reservations import Reservation, ReservedMemory
from mlx_server.pool.resident_models import ResidentModels


class WaitQueue:
    """The waiting reservations in the order of service. `Policy` builds it anew each time that it
    serves requests."""

    def __init__(self, resident: ResidentModels, granted: Granted, budget: int) -> None:
        self._resident = resident
        self._granted = granted
        self._budget = budget
        self._reservations: list[Reservation] = []
        self._promised: list[Reservation] = []
        self._promised_weights = 0
        """The bytes of the models that must be loaded for the promised reservations."""
        self.models: set[str] = set()
        self.stuck = False
        """Whether a queued reservation can be served only after leases have ended."""

    @property
    def promised(self) -> int:
        """The bytes set aside for the queue. They can grow with a grant: the memory kept for any
        one reservation to reach its end is shared, and the grant may use what the queue counted
        on."""
        caches = self._granted.reserved_with(self._promised).nbytes - self._granted.reserved.nbytes
        return caches + self._promised_weights

    def more(self, reservation: Reservation) -> int:
        """The bytes that the reservation's rows would add to those granted and those queued."""
        return self._granted.reserved_with(self._reservations).more(reservation)

    def needs(self, reservation: Reservation) -> int:
        """The bytes of `more`, and those of the reservation's model unless they are counted
        already."""
        return self.more(reservation) + self._weights(reservation)

    def let_pass(self, reservation: Reservation) -> bool:
        """Whether the reservation may be granted before all that are queued: see
        `Policy._serve`."""
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
        """Sets memory aside for a reservation, before it is added to the queue."""
        self._promised.append(reservation)
        self._promised_weights += self._weights(reservation)

    def _weights(self, reservation: Reservation) -> int:
        """The bytes of the reservation's model, if it is neither in memory nor counted for an
        earlier reservation."""
        model = self._resident[reservation.model]
        return 0 if model.is_present or reservation.model in self.models else model.nbytes
