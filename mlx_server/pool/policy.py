"""Which models are in memory, who waits for them, and what is evicted.

Events go in and actions come out; nothing here runs, sleeps or measures. What is counted against
the budget: the weights of models, the KV cache reserved by granted tickets, and the prompt cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlx_server.pool.actions import (
    Action,
    Actions,
    FailedToLoad,
    Grant,
    LoadAction,
    ModelFacts,
    NeverFits,
    PolicyView,
    PreemptAction,
    Reason,
    Refuse,
    ResumeAction,
    ShrinkCache,
    State,
    Ticket,
    UnloadAction,
    WaitedTooLong,
)
from mlx_server.pool.fair_order import FairOrder
from mlx_server.pool.reservations import Reservation, ReservedMemory, bytes_alone


@dataclass
class _PolicyModel:
    id: str
    facts: ModelFacts
    weights: int
    extra_bytes: int = 0
    state: State = "unloaded"
    leases: int = 0
    last_used: float | None = None

    @property
    def nbytes(self) -> int:
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


@dataclass
class _WaitQueue:
    """Those that were looked at and go on waiting, in their order."""

    reservations: list[Reservation] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    promised: int = 0
    """Their part of the memory that is free or becoming free."""
    stuck: bool = False
    """One of them needs leases to end."""


class Policy:
    """Each event returns what is to be done now, in that order.

    Actions that follow a `ShrinkCache` count on it having been carried out. After `engine_lost`
    nothing may be reported any more of what was asked of that engine.
    """

    def __init__(
        self, models: Mapping[str, ModelFacts], *, budget: int, wait_seconds: float
    ) -> None:
        self.budget = budget
        self.wait_seconds = wait_seconds
        self.lowered = 0
        """Bytes by which the budget was lowered."""
        self.cache = 0
        """Bytes in the prompt cache, once it has shrunk as told."""
        self._models = {id: _PolicyModel(id, facts, facts.weights) for id, facts in models.items()}
        self._waiting: list[Reservation] = []
        self._granted: dict[Ticket, Reservation] = {}
        self._order = FairOrder()
        self._clock = 0
        """Counts what comes and what is granted."""
        self._actions: list[Action] = []

    def request(
        self,
        ticket: Ticket,
        model: str,
        kv_bytes: int,
        now: float,
        *,
        most_kv_bytes: int = 0,
        rows: int = 1,
        extra_bytes: int = 0,
        client: str = "",
    ) -> Actions:
        """Asks for a lease on the model, from `Grant` to `release`, with the caches of `rows`, of
        which the longest takes `kv_bytes` soon and `most_kv_bytes` at its end, and `beside` bytes
        of whatever else."""
        assert ticket not in self._granted
        assert ticket not in self.waiting
        most, came = max(kv_bytes, most_kv_bytes), self._tick_of_clock()
        turn = self._order.next(client, rows), came
        self._waiting.append(
            Reservation(ticket, model, rows, kv_bytes, most, extra_bytes, now, turn, came)
        )
        self._waiting.sort(key=lambda each: each.turn)
        return self._settle(now)

    def resize(self, ticket: Ticket, kv_bytes: int, now: float) -> Actions:
        """What the longest row of a granted ticket takes from now on. Where there is no room for
        it, the last rows are preempted, this ticket's own if they are the last."""
        if (ask := self._granted.get(ticket)) is None:
            return ()  # the engine was lost
        ask.kv_bytes = min(kv_bytes, ask.most_kv_bytes)
        return self._settle(now)

    def release(self, ticket: Ticket, now: float) -> Actions:
        """A ticket that is void, because the engine was lost, may be released too."""
        if (ask := self._granted.pop(ticket, None)) is not None:
            model = self._models[ask.model]
            model.leases -= 1
            model.last_used = now
        return self._settle(now)

    def cancel(self, ticket: Ticket, now: float) -> Actions:
        """Of a ticket that waits. A load that was begun for it goes on."""
        self._waiting = [ask for ask in self._waiting if ask.ticket != ticket]
        return self._settle(now)

    def loaded(self, model: str, nbytes: int, now: float) -> Actions:
        self._change_state(model, "loading", "ready")
        self._models[model].weights = nbytes
        self._models[model].last_used = now
        return self._settle(now)

    def set_extra_bytes(self, model: str, nbytes: int, now: float) -> Actions:
        """What stays in memory with a model that is there, and goes with it."""
        self._models[model].extra_bytes = nbytes
        return self._settle(now)

    def load_failed(self, model: str, now: float) -> Actions:
        """Refuses all who wait for the model; who asks later tries again."""
        self._change_state(model, "loading", "unloaded")
        for ask in [ask for ask in self._waiting if ask.model == model]:
            self._refuse(ask, FailedToLoad(model))
        return self._settle(now)

    def unloaded(self, model: str, now: float) -> Actions:
        """The memory is really back."""
        self._change_state(model, "unloading", "unloaded")
        self._models[model].extra_bytes = 0
        return self._settle(now)

    def cache_bytes(self, nbytes: int) -> Actions:
        """What the prompt cache holds now. It keeps nobody waiting, so nobody is served by this."""
        self.cache = nbytes
        self._shrink_cache(0)
        return self._taken()

    def engine_lost(self, now: float) -> Actions:
        """Nothing is in memory and all leases are void; who waits goes on waiting."""
        self._granted.clear()
        self.cache = 0
        for model in self._models.values():
            model.state, model.leases, model.extra_bytes = "unloaded", 0, 0
        return self._settle(now)

    def preload(self, model: str, now: float) -> Actions:
        """Loads it if there is room that nobody waits for; no model is evicted for it."""
        room = self._serve(now)
        if self._models[model].state == "unloaded" and self._models[model].nbytes <= room:
            self._load(self._models[model])
        return self._settle(now)

    def estimate(self, model: str, nbytes: int) -> None:
        """A better guess, of a model whose files have only now been seen."""
        if self._models[model].state == "unloaded":
            self._models[model].weights = nbytes

    def lower(self, now: float) -> Actions:
        """Memory ran out within the budget: half of what it leaves to caches is given up for good.
        The weights in memory stay admitted."""
        weights = sum(m.nbytes for m in self._models.values() if m.state != "unloaded")
        less = max(0, self.budget - weights) // 2
        self.budget -= less
        self.lowered += less
        return self._settle(now)

    def tick(self, now: float) -> Actions:
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """When `tick` is due, if no other event comes first."""
        due = [self._late_at(ask) for ask in self._waiting]
        due += [self._stale_at(model) for model in self._models.values()]
        return min((at for at in due if at is not None), default=None)

    def state(self, model: str) -> State:
        return self._models[model].state

    def views(self) -> dict[str, PolicyView]:
        models = self._models.items()
        return {id: PolicyView(m.state, m.leases, m.nbytes, m.last_used) for id, m in models}

    def room(self, model: str) -> int:
        """Bytes that rows of the model can have, were there no others."""
        return self._available(self._models[model]) - self._models[model].nbytes

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        return tuple(ask.ticket for ask in self._waiting)

    @property
    def preempted(self) -> tuple[Ticket, ...]:
        return tuple(each.ticket for each in self._preempted)

    @property
    def kv_reserved(self) -> int:
        return self._reserved.now

    @property
    def used(self) -> int:
        return self._weights + self.kv_reserved + self.cache

    @property
    def _weights(self) -> int:
        return sum(m.nbytes for m in self._models.values() if m.state != "unloaded")

    @property
    def _reserved(self) -> ReservedMemory:
        return ReservedMemory(self._granted.values())

    @property
    def _preempted(self) -> list[Reservation]:
        preempted = (each for each in self._granted.values() if each.preempted)
        return sorted(preempted, key=lambda each: each.turn)

    @property
    def _free(self) -> int:
        """The prompt cache is no obstacle. Negative when a model is larger than was thought."""
        return self.budget - self._weights - self._reserved.nbytes

    @property
    def _free_soon(self) -> int:
        unloading = (m.nbytes for m in self._models.values() if m.state == "unloading")
        return self._free + sum(unloading)

    def _settle(self, now: float) -> Actions:
        self._preempt()
        self._shrink_cache(0)
        self._serve(now)
        if self._refuse_late(now):
            self._serve(now)
        self._unload_stale(now)
        self._evict(-self._free_soon, self._evictable())
        return self._taken()

    def _preempt(self) -> None:
        """The last rows give way to those before them, which grow; the first one never does."""
        while self._free < 0 and self._reserved.can_be_less:
            running = [each for each in self._granted.values() if not each.preempted]
            last = max(running, key=lambda each: each.turn)
            last.preempted = True
            self._actions.append(PreemptAction(last.ticket))

    def _serve(self, now: float) -> int:
        """Resumes, grants, loads and evicts in order; returns the room that nobody waits for.

        The rows that were preempted come first, and while one of them waits nobody is granted
        anything. Then those that wait take turns by client, and of one client in order of arrival.

        Nobody starves: a later one only gets what was not promised to an earlier one, and it
        passes it only if that one would still fit next to all that was granted past it, grown to
        its end, and the pinned models. So nobody ever waits for leases of later ones. No deadlock:
        room is kept for one granted reservation to come to its end, which the first of them does
        whatever the others need; loading and unloading end by themselves, what is idle is evicted,
        and what would not fit even then is refused.
        """
        line = _WaitQueue()
        for ask in [*self._preempted, *self._waiting]:
            if not ask.preempted and (misfit := self._refusal_reason(ask)):
                self._refuse(ask, misfit)
            elif self._may_grant(ask, line):
                self._resume(ask) if ask.preempted else self._grant(ask, now)
            else:
                self._wait_in(line, ask)
        return 0 if line.stuck else min(self._free, self._free_soon - line.promised)

    def _refusal_reason(self, reservation: Reservation) -> NeverFits | None:
        model = self._models[reservation.model]
        needed, available = model.nbytes + bytes_alone(reservation), self._available(model)
        return NeverFits(needed, available) if needed > available else None

    def _available(self, model: _PolicyModel) -> int:
        """What the model and its rows can have, next to the models that stay."""
        return self.budget - sum(
            m.nbytes for m in self._models.values() if m.must_stay and m is not model
        )

    def _may_grant(self, reservation: Reservation, queue: _WaitQueue) -> bool:
        return (
            self._models[reservation.model].state == "ready"
            and reservation.model not in queue.models
            and self._has_room(reservation, queue)
            and all(self._may_pass(reservation, earlier, queue) for earlier in queue.reservations)
        )

    def _has_room(self, reservation: Reservation, queue: _WaitQueue) -> bool:
        """Next to what is granted, and to what those before it will need."""
        reserved = self._reserved
        more = reserved.more(reservation)
        if reservation.preempted and not more:
            return True  # it goes on in the room that is kept for one
        with_line = self._reserved_with_queue(queue).more(reservation)
        return more <= self._free and max(more, with_line) <= self._free_soon - queue.promised

    def _reserved_with_queue(self, line: _WaitQueue) -> ReservedMemory:
        taken = self._reserved
        for earlier in line.reservations:
            taken.take(earlier)
        return taken

    def _may_pass(self, reservation: Reservation, earlier: Reservation, queue: _WaitQueue) -> bool:
        if earlier.preempted:
            return False
        passing = [reservation.at_its_end, *(each.at_its_end for each in self._passed(earlier))]
        beside = {m.id for m in self._models.values() if m.must_stay} | {p.model for p in passing}
        beside |= {id for id in queue.models if self._models[id].facts.pinned}
        taken, weights = ReservedMemory(passing), sum(self._models[id].nbytes for id in beside)
        needs = self._needs(earlier, taken, earlier.model in beside)
        return weights + taken.nbytes + needs <= self.budget

    def _passed(self, earlier: Reservation) -> list[Reservation]:
        """Those that were granted past it."""
        granted = ((each, each.granted or 0) for each in self._granted.values())
        return [
            each for each, at in granted if at > earlier.waiting_since and each.turn > earlier.turn
        ]

    def _wait_in(self, queue: _WaitQueue, reservation: Reservation) -> None:
        """Its model is loaded, or others are evicted for it, as soon as that is enough."""
        model = self._models[reservation.model]
        taken = self._reserved_with_queue(queue)
        needs = self._needs(
            reservation, taken, model.is_present or reservation.model in queue.models
        )
        keep = {*queue.models, reservation.model}
        queue.stuck = queue.stuck or not self._make_room(queue.promised + needs, keep)
        if not queue.stuck:
            queue.promised += needs
            if model.state == "unloaded" and model.nbytes <= self._free:
                queue.promised -= model.nbytes
                self._load(model)
        queue.reservations.append(reservation)
        queue.models.add(reservation.model)

    def _needs(self, reservation: Reservation, taken: ReservedMemory, model_counted: bool) -> int:
        return taken.more(reservation) + (
            0 if model_counted else self._models[reservation.model].nbytes
        )

    def _make_room(self, room: int, keep: set[str]) -> bool:
        """Whether there will be room without a lease having to end; if not, nothing is evicted."""
        missing = room - self._free_soon
        idle = [model for model in self._evictable() if model.id not in keep]
        if missing > sum(model.nbytes for model in idle):
            return False
        self._evict(missing, idle)
        return True

    def _evictable(self) -> list[_PolicyModel]:
        """Least recently used first."""
        idle = (model for model in self._models.values() if model.evictable)
        return sorted(idle, key=lambda model: model.last_used or 0.0)

    def _evict(self, missing: int, idle: list[_PolicyModel]) -> None:
        victims: list[_PolicyModel] = []
        for model in idle:
            if missing > 0:
                victims.append(model)
                missing -= model.nbytes
        for model in victims:
            if missing + model.nbytes <= 0:  # the later ones are enough without it
                missing += model.nbytes
            else:
                self._unload(model)

    def _grant(self, reservation: Reservation, now: float) -> None:
        self._shrink_cache(self._reserved.more_now(reservation))
        self._waiting.remove(reservation)
        self._granted[reservation.ticket] = reservation
        reservation.granted = self._tick_of_clock()
        self._order.granted(reservation.turn[0])
        model = self._models[reservation.model]
        model.leases += 1
        model.last_used = now
        self._actions.append(Grant(reservation.ticket))

    def _resume(self, reservation: Reservation) -> None:
        self._shrink_cache(self._reserved.more_now(reservation))
        reservation.preempted = False
        self._actions.append(ResumeAction(reservation.ticket))

    def _tick_of_clock(self) -> int:
        self._clock += 1
        return self._clock

    def _refuse(self, reservation: Reservation, reason: Reason) -> None:
        self._waiting.remove(reservation)
        self._actions.append(Refuse(reservation.ticket, reason))

    def _load(self, model: _PolicyModel) -> None:
        self._shrink_cache(model.nbytes)
        model.state = "loading"
        self._actions.append(LoadAction(model.id))

    def _unload(self, model: _PolicyModel) -> None:
        model.state = "unloading"
        self._actions.append(UnloadAction(model.id))

    def _shrink_cache(self, room: int) -> None:
        over = self.used + room - self.budget
        if over > 0 and self.cache:
            self.cache = max(0, self.cache - over)
            self._actions.append(ShrinkCache(self.cache))

    def _refuse_late(self, now: float) -> bool:
        late = [
            ask for ask in self._waiting if (at := self._late_at(ask)) is not None and at <= now
        ]
        for ask in late:
            self._refuse(ask, WaitedTooLong(now - ask.requested_at))
        return bool(late)

    def _late_at(self, reservation: Reservation) -> float | None:
        """Never while its model is loading, which takes as long as it takes."""
        loading = self._models[reservation.model].state == "loading"
        return None if loading else reservation.requested_at + self.wait_seconds

    def _unload_stale(self, now: float) -> None:
        for model in self._models.values():
            if (at := self._stale_at(model)) is not None and at <= now:
                self._unload(model)

    def _stale_at(self, model: _PolicyModel) -> float | None:
        wanted = any(ask.model == model.id for ask in self._waiting)
        if not model.evictable or wanted or model.facts.ttl is None or model.last_used is None:
            return None
        return model.last_used + model.facts.ttl

    def _change_state(self, model: str, before: State, after: State) -> None:
        assert self._models[model].state == before, (model, self._models[model].state)
        self._models[model].state = after

    def _taken(self) -> Actions:
        actions, self._actions = tuple(self._actions), []
        return actions
