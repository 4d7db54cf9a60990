"""What is in memory and what is reserved of it: the models' weights, and the KV caches of tickets,
granted and waiting. The policy decides by these books.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Literal

from mlx_server.requests import Tier

Ticket = int
State = Literal["unloaded", "loading", "ready", "unloading"]


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model before it is loaded, from models.yaml and the files."""

    weights: int
    """The estimated bytes of its weights; 0 until its files have been read."""
    pinned: bool = False
    ttl: float | None = None
    """The seconds without a request after which it is unloaded; None: it stays."""


@dataclass
class ResidentModel:
    """The policy's record of a model: what it takes in memory, and whether it may be evicted."""

    id: str
    facts: ModelFacts
    weights: int
    extra_bytes: int = 0
    state: State = "unloaded"
    leases: int = 0
    last_used: float | None = None
    requested_ttl: float | None = None
    """The seconds that a request set in place of `ttl`, until the model is unloaded. They are
    infinite if the model should stay until its memory is needed."""

    @property
    def ttl(self) -> float | None:
        return self.facts.ttl if self.requested_ttl is None else self.requested_ttl

    @property
    def nbytes(self) -> int:
        """The bytes in memory, or an estimate until it has been loaded once."""
        return self.weights + self.extra_bytes

    @property
    def is_present(self) -> bool:
        return self.state in ("loading", "ready")

    @property
    def must_stay(self) -> bool:
        return self.is_present and self.facts.pinned

    @property
    def evictable(self) -> bool:
        return self.state == "ready" and not self.leases and not self.facts.pinned

    def enter(self, after: State, *, before: State) -> None:
        assert self.state == before, (self.id, self.state)
        self.state = after

    def forget(self) -> None:
        """Records that the engine was lost, and with it the model's memory and leases."""
        self.state, self.leases, self.extra_bytes = "unloaded", 0, 0
        self.requested_ttl = None


class ResidentModels:
    def __init__(self, models: Mapping[str, ModelFacts]) -> None:
        self._models = {id: ResidentModel(id, facts, facts.weights) for id, facts in models.items()}

    def __getitem__(self, id: str) -> ResidentModel:
        return self._models[id]

    def __iter__(self) -> Iterator[ResidentModel]:
        return iter(self._models.values())

    @property
    def nbytes(self) -> int:
        """The bytes of all models in memory, including those that are loading or unloading."""
        return sum(model.nbytes for model in self if model.state != "unloaded")

    @property
    def unloading(self) -> int:
        """The bytes that will soon be free because their models are unloading."""
        return sum(model.nbytes for model in self if model.state == "unloading")

    def pinned_next_to(self, other: ResidentModel) -> int:
        """The bytes of the other models that must stay in memory."""
        return sum(model.nbytes for model in self if model.must_stay and model is not other)

    def evictable(self, keep: Collection[str] = ()) -> list[ResidentModel]:
        """The models that may be evicted, the least recently used first."""
        idle = (model for model in self if model.evictable and model.id not in keep)
        return sorted(idle, key=lambda model: model.last_used or 0.0)


def victims(missing: int, idle: list[ResidentModel]) -> Iterator[ResidentModel]:
    """Idle models that together free `missing` bytes, in their order. Models that turn out not to
    be needed, because later ones are large enough, are left out."""
    chosen: list[ResidentModel] = []
    for model in idle:
        if missing > 0:
            chosen.append(model)
            missing -= model.nbytes
    for model in chosen:
        if missing + model.nbytes <= 0:
            missing += model.nbytes
        else:
            yield model


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
    turn: tuple[Tier, int, int]
    """The sort key of the order in which reservations are served: by tier, then in turns."""
    waiting_since: int
    """The tick of the policy's clock at which it began to wait."""
    stopped_at: float
    """When it began to wait, or was preempted."""
    granted: int = 0
    """The tick of the policy's clock at which it was granted."""
    preempted: bool = False
    begun: bool = False
    """Whether a row of it has been sent to the engine."""

    @property
    def at_its_end(self) -> "Reservation":
        grown = copy(self)
        grown.kv_bytes, grown.preempted = self.most_kv_bytes, False
        return grown


@dataclass(slots=True)
class _Batch:
    """The running rows of one model."""

    rows: int = 0
    longest: int = 0
    """The KV bytes of the longest row."""
    alone: int = 0
    """The KV bytes of all rows without padding."""
    padding: float = 0
    """The most KV bytes of padding."""

    def join(self, more: Reservation) -> None:
        padding = math.inf if more.padding_bytes is None else more.padding_bytes
        self.rows += more.rows
        self.longest = max(self.longest, more.kv_bytes)
        self.alone += more.rows * more.kv_bytes
        self.padding = max(self.padding, padding)

    @property
    def nbytes(self) -> int:
        return int(min(self.rows * self.longest, self.alone + self.padding))


class ReservedMemory:
    """The memory of several reservations, without their models' weights.

    The engine pads the rows of a group to the longest one, and splits groups whose padding would
    exceed what is reserved here. Rows grow; if memory runs short, all reservations but the first
    can be preempted. So it suffices to keep enough for any one of them to reach its end alone.
    """

    def __init__(self, granted: Iterable[Reservation] = (), *, begun: bool = False) -> None:
        """begun: whether to count only rows that the engine has."""
        self._batches: dict[str, _Batch] = {}
        """The running rows, by model."""
        self._extra_bytes = 0
        self._largest = 0
        """The KV bytes at its end of the reservation that needs most, if it ran alone."""
        for each in granted:
            self._hold(each)
            if not each.preempted and (each.begun or not begun):
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
        both._batches = {model: copy(batch) for model, batch in self._batches.items()}
        both.take(reservation)
        return both

    def _hold(self, reservation: Reservation) -> None:
        self._extra_bytes += reservation.extra_bytes
        self._largest = max(self._largest, reservation.rows * reservation.most_kv_bytes)

    def _run(self, reservation: Reservation) -> None:
        self._batches.setdefault(reservation.model, _Batch()).join(reservation)

    @property
    def _in_batches(self) -> int:
        return sum(batch.nbytes for batch in self._batches.values())


class Granted(dict[Ticket, Reservation]):
    """The granted reservations, running and preempted. A ticket is void, and not here, after the
    engine was lost."""

    @property
    def reserved(self) -> ReservedMemory:
        return ReservedMemory(self.values())

    def reserved_with(self, waiting: Iterable[Reservation]) -> ReservedMemory:
        memory = self.reserved
        for each in waiting:
            memory.take(each)
        return memory

    @property
    def in_use(self) -> int:
        """The bytes of the reservations whose rows the engine has."""
        return ReservedMemory(self.values(), begun=True).now

    @property
    def preempted(self) -> list[Reservation]:
        """The preempted reservations, in the order in which they are resumed."""
        preempted = (each for each in self.values() if each.preempted)
        return sorted(preempted, key=lambda each: each.turn)

    @property
    def running(self) -> list[Reservation]:
        """The reservations that are not preempted, the last in turn first."""
        running = (each for each in self.values() if not each.preempted)
        return sorted(running, key=lambda each: each.turn, reverse=True)

    def passed(self, earlier: Reservation) -> list[Reservation]:
        """The reservations of later turns that were granted while `earlier` waited."""
        since, turn = earlier.waiting_since, earlier.turn
        return [each for each in self.values() if each.granted > since and each.turn > turn]


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
        if not self._promised:
            return 0
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
        memory, weights = ReservedMemory(passing), sum(self._resident[id].nbytes for id in present)
        needs = memory.more(earlier)
        needs += 0 if earlier.model in present else self._resident[earlier.model].nbytes
        return weights + memory.nbytes + needs <= self._budget

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
