"""Which models are in memory, who waits for them, and what is evicted.

Events go in and actions come out; nothing here runs, sleeps or measures. What is counted against
the budget: the weights of models, the KV cache reserved by granted tickets, and the prompt cache.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Ticket = int
State = Literal["unloaded", "loading", "ready", "unloading"]


@dataclass(frozen=True)
class Facts:
    """What the owner and the files say of a model before it is loaded."""

    weights: int
    pinned: bool = False
    ttl: float | None = None


@dataclass(frozen=True)
class Load:
    model: str


@dataclass(frozen=True)
class Unload:
    model: str


@dataclass(frozen=True)
class ShrinkCache:
    to_bytes: int


@dataclass(frozen=True)
class Grant:
    ticket: Ticket


@dataclass(frozen=True)
class NeverFits:
    needed: int
    available: int
    """The budget without the pinned models that stay in memory."""


@dataclass(frozen=True)
class QueueFull:
    waiting: int


@dataclass(frozen=True)
class WaitedTooLong:
    seconds: float


@dataclass(frozen=True)
class LoadFailed:
    model: str


Reason = NeverFits | QueueFull | WaitedTooLong | LoadFailed


@dataclass(frozen=True)
class Refuse:
    ticket: Ticket
    reason: Reason


Actions = tuple[Load | Unload | ShrinkCache | Grant | Refuse, ...]


@dataclass(frozen=True)
class View:
    """A model as its owner sees it."""

    state: State
    leases: int
    nbytes: int
    """An estimate until it has been loaded once."""
    last_used: float | None


@dataclass
class _Model:
    id: str
    facts: Facts
    weights: int
    beside: int = 0
    state: State = "unloaded"
    leases: int = 0
    last_used: float | None = None

    @property
    def nbytes(self) -> int:
        return self.weights + self.beside

    @property
    def here(self) -> bool:
        return self.state in ("loading", "ready")

    @property
    def stays(self) -> bool:
        return self.here and self.facts.pinned

    @property
    def evictable(self) -> bool:
        return self.state == "ready" and not self.leases and not self.facts.pinned


@dataclass(frozen=True)
class _Ask:
    """One ticket, waiting or granted."""

    ticket: Ticket
    model: str
    rows: int
    kv_bytes: int
    """Of its longest row."""
    beside: int
    since: float
    number: int
    """In order of arrival."""


class _Reserved:
    """Memory for asks, beside their models: a batch keeps every row as long as its longest."""

    def __init__(self, asks: Iterable[_Ask]) -> None:
        self.nbytes = 0
        self._batches: dict[str, tuple[int, int]] = {}
        """Of each model, rows and the bytes of the longest."""
        for ask in asks:
            self.add(ask)

    def add(self, ask: _Ask) -> None:
        self.nbytes += self.more(ask)
        rows, longest = self._batches.get(ask.model, (0, 0))
        self._batches[ask.model] = rows + ask.rows, max(longest, ask.kv_bytes)

    def more(self, ask: _Ask) -> int:
        """What it would add."""
        rows, longest = self._batches.get(ask.model, (0, 0))
        padded = (rows + ask.rows) * max(longest, ask.kv_bytes)
        return padded - rows * longest + ask.beside


@dataclass
class _Line:
    """Those who were looked at and go on waiting, in order of arrival."""

    asks: list[_Ask] = field(default_factory=list)
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
        self, models: Mapping[str, Facts], *, budget: int, max_waiting: int, wait_seconds: float
    ) -> None:
        assert max_waiting > 0, "a model is loaded for somebody who waits"
        self.budget = budget
        self.max_waiting = max_waiting
        self.wait_seconds = wait_seconds
        self.cache = 0
        """Bytes in the prompt cache, once it has shrunk as told."""
        self._models = {id: _Model(id, facts, facts.weights) for id, facts in models.items()}
        self._waiting: list[_Ask] = []
        self._granted: dict[Ticket, _Ask] = {}
        self._arrivals = 0
        self._actions: list[Load | Unload | ShrinkCache | Grant | Refuse] = []

    def request(
        self,
        ticket: Ticket,
        model: str,
        kv_bytes: int,
        now: float,
        *,
        rows: int = 1,
        beside: int = 0,
    ) -> Actions:
        """Asks for a lease on the model, from `Grant` to `release`, with the caches of `rows`, of
        which the longest takes `kv_bytes`, and `beside` bytes of whatever else."""
        assert ticket not in self._granted
        assert ticket not in self.waiting
        self._arrivals += 1
        self._waiting.append(_Ask(ticket, model, rows, kv_bytes, beside, now, self._arrivals))
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
        self._become(model, "loading", "ready")
        self._models[model].weights = nbytes
        self._models[model].last_used = now
        return self._settle(now)

    def beside(self, model: str, nbytes: int, now: float) -> Actions:
        """What stays in memory with a model that is there, and goes with it."""
        self._models[model].beside = nbytes
        return self._settle(now)

    def load_failed(self, model: str, now: float) -> Actions:
        """Refuses all who wait for the model; who asks later tries again."""
        self._become(model, "loading", "unloaded")
        for ask in [ask for ask in self._waiting if ask.model == model]:
            self._refuse(ask, LoadFailed(model))
        return self._settle(now)

    def unloaded(self, model: str, now: float) -> Actions:
        """The memory is really back."""
        self._become(model, "unloading", "unloaded")
        self._models[model].beside = 0
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
            model.state, model.leases, model.beside = "unloaded", 0, 0
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

    def tick(self, now: float) -> Actions:
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """When `tick` is due, if no other event comes first."""
        due = [self._late_at(ask) for ask in self._waiting]
        due += [self._stale_at(model) for model in self._models.values()]
        return min((at for at in due if at is not None), default=None)

    def views(self) -> dict[str, View]:
        models = self._models.items()
        return {id: View(m.state, m.leases, m.nbytes, m.last_used) for id, m in models}

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        return tuple(ask.ticket for ask in self._waiting)

    @property
    def kv_reserved(self) -> int:
        return self._reserved.nbytes

    @property
    def _reserved(self) -> _Reserved:
        return _Reserved(self._granted.values())

    @property
    def used(self) -> int:
        weights = sum(m.nbytes for m in self._models.values() if m.state != "unloaded")
        return weights + self.kv_reserved + self.cache

    @property
    def _free(self) -> int:
        """The prompt cache is no obstacle. Negative when a model is larger than was thought."""
        return self.budget - self.used + self.cache

    @property
    def _free_soon(self) -> int:
        unloading = (m.nbytes for m in self._models.values() if m.state == "unloading")
        return self._free + sum(unloading)

    def _settle(self, now: float) -> Actions:
        self._shrink_cache(0)
        self._serve(now)
        if self._refuse_late(now):
            self._serve(now)
        self._unload_stale(now)
        self._evict(-self._free_soon, self._evictable())
        return self._taken()

    def _serve(self, now: float) -> int:
        """Grants, loads and evicts in order of arrival; returns the room that nobody waits for.

        Nobody starves: a later ask only gets what was not promised to an earlier one, and it passes
        one that is stuck only if that one would still fit beside all that was granted past it and
        the pinned models. So nobody ever waits for leases of those who came later. No deadlock: a
        granted lease waits for nothing here, loading and unloading end by themselves, what is idle
        is evicted, and what would not fit even then is refused.
        """
        line = _Line()
        for ask in tuple(self._waiting):
            if misfit := self._misfit(ask):
                self._refuse(ask, misfit)
            elif self._may_go(ask, line):
                self._grant(ask, now)
            elif len(line.asks) >= self.max_waiting:
                self._refuse(ask, QueueFull(len(line.asks)))
            else:
                self._wait_in(line, ask)
        return 0 if line.stuck else min(self._free, self._free_soon - line.promised)

    def _misfit(self, ask: _Ask) -> NeverFits | None:
        model = self._models[ask.model]
        stay = sum(m.nbytes for m in self._models.values() if m.stays and m is not model)
        needed, available = model.nbytes + _Reserved([ask]).nbytes, self.budget - stay
        return NeverFits(needed, available) if needed > available else None

    def _may_go(self, ask: _Ask, line: _Line) -> bool:
        return (
            self._models[ask.model].state == "ready"
            and ask.model not in line.models
            and self._reserved.more(ask) <= min(self._free, self._free_soon - line.promised)
            and (not line.stuck or self._may_pass(ask, line))
        )

    def _may_pass(self, ask: _Ask, line: _Line) -> bool:
        first = line.asks[0].number
        passing = [ask, *(lease for lease in self._granted.values() if lease.number > first)]
        beside = {m.id for m in self._models.values() if m.stays} | {p.model for p in passing}
        beside |= {id for id in line.models if self._models[id].facts.pinned}
        taken, weights = _Reserved(passing), sum(self._models[id].nbytes for id in beside)
        return all(
            weights + taken.nbytes + self._needs(earlier, taken, earlier.model in beside)
            <= self.budget
            for earlier in line.asks
        )

    def _wait_in(self, line: _Line, ask: _Ask) -> None:
        """Its model is loaded, or others are evicted for it, as soon as that is enough."""
        model = self._models[ask.model]
        taken = _Reserved([*self._granted.values(), *line.asks])
        needs = self._needs(ask, taken, model.here or ask.model in line.models)
        keep = {*line.models, ask.model}
        line.stuck = line.stuck or not self._make_room(line.promised + needs, keep)
        if not line.stuck:
            line.promised += needs
            if model.state == "unloaded" and model.nbytes <= self._free:
                line.promised -= model.nbytes
                self._load(model)
        line.asks.append(ask)
        line.models.add(ask.model)

    def _needs(self, ask: _Ask, taken: _Reserved, model_counted: bool) -> int:
        return taken.more(ask) + (0 if model_counted else self._models[ask.model].nbytes)

    def _make_room(self, room: int, keep: set[str]) -> bool:
        """Whether there will be room without a lease having to end; if not, nothing is evicted."""
        missing = room - self._free_soon
        idle = [model for model in self._evictable() if model.id not in keep]
        if missing > sum(model.nbytes for model in idle):
            return False
        self._evict(missing, idle)
        return True

    def _evictable(self) -> list[_Model]:
        """Least recently used first."""
        idle = (model for model in self._models.values() if model.evictable)
        return sorted(idle, key=lambda model: model.last_used or 0.0)

    def _evict(self, missing: int, idle: list[_Model]) -> None:
        victims: list[_Model] = []
        for model in idle:
            if missing > 0:
                victims.append(model)
                missing -= model.nbytes
        for model in victims:
            if missing + model.nbytes <= 0:  # the later ones are enough without it
                missing += model.nbytes
            else:
                self._unload(model)

    def _grant(self, ask: _Ask, now: float) -> None:
        self._shrink_cache(self._reserved.more(ask))
        self._waiting.remove(ask)
        self._granted[ask.ticket] = ask
        model = self._models[ask.model]
        model.leases += 1
        model.last_used = now
        self._actions.append(Grant(ask.ticket))

    def _refuse(self, ask: _Ask, reason: Reason) -> None:
        self._waiting.remove(ask)
        self._actions.append(Refuse(ask.ticket, reason))

    def _load(self, model: _Model) -> None:
        self._shrink_cache(model.nbytes)
        model.state = "loading"
        self._actions.append(Load(model.id))

    def _unload(self, model: _Model) -> None:
        model.state = "unloading"
        self._actions.append(Unload(model.id))

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
            self._refuse(ask, WaitedTooLong(now - ask.since))
        return bool(late)

    def _late_at(self, ask: _Ask) -> float | None:
        """Never while its model is loading, which takes as long as it takes."""
        loading = self._models[ask.model].state == "loading"
        return None if loading else ask.since + self.wait_seconds

    def _unload_stale(self, now: float) -> None:
        for model in self._models.values():
            if (at := self._stale_at(model)) is not None and at <= now:
                self._unload(model)

    def _stale_at(self, model: _Model) -> float | None:
        wanted = any(ask.model == model.id for ask in self._waiting)
        if not model.evictable or wanted or model.facts.ttl is None or model.last_used is None:
            return None
        return model.last_used + model.facts.ttl

    def _become(self, model: str, before: State, after: State) -> None:
        assert self._models[model].state == before, (model, self._models[model].state)
        self._models[model].state = after

    def _taken(self) -> Actions:
        actions, self._actions = tuple(self._actions), []
        return actions
