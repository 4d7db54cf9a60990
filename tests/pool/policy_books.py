"""The books of a policy's models, leases and memory, as one keeps them who does not ask it, and
what of the policy must agree with them at any time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from mlx_server.pool.policy import Policy
from mlx_server.pool.reservations import ModelFacts

WAIT = 30.0


@dataclass(frozen=True)
class Ask:
    model: str
    rows: int
    kv_bytes: int
    most: int
    """Of kv_bytes, at the end."""
    beside: int
    since: float
    client: str
    padding: int | None = None
    turn: tuple[int, int] = (0, 0)
    granted: int = 0
    """When, by the number of tickets and grants there were."""
    preempted: bool = False


def ask_of(number: int, models: Sequence[str], now: float) -> Ask:
    number, which = divmod(number, 4)
    number, size = divmod(number, 4)
    kv_bytes, most = ((0, 0), (1, 1), (1, 3), (1, 2))[size]
    rows, beside = (1, 1, 1, 2)[number % 4], (0, 0, 1, 2)[number // 4]
    client = "one" if which % 3 else "other"
    at = which % len(models)
    return Ask(models[at], rows, kv_bytes, most, beside, now, client, (None, 1, 0)[at % 3])


def in_use(asks: Iterable[Ask]) -> int:
    """A model's rows are padded to the longest, or by the most that was asked for; what was
    preempted has no rows."""
    rows: dict[str, int] = {}
    longest: dict[str, int] = {}
    alone: dict[str, float] = {}
    beside = 0
    for ask in asks:
        beside += ask.beside
        if not ask.preempted:
            rows[ask.model] = rows.get(ask.model, 0) + ask.rows
            longest[ask.model] = max(longest.get(ask.model, 0), ask.kv_bytes)
            padding = inf if ask.padding is None else ask.padding  # the same for all of a model
            alone[ask.model] = alone.get(ask.model, padding) + ask.rows * ask.kv_bytes
    return beside + sum(int(min(rows[model] * longest[model], alone[model])) for model in rows)


def for_one(asks: Iterable[Ask]) -> int:
    """Room for each of them to come to its end, alone."""
    all_asks = list(asks)
    beside = sum(ask.beside for ask in all_asks)
    return beside + max((ask.rows * ask.most for ask in all_asks), default=0)


def reserved(asks: Iterable[Ask]) -> int:
    all_asks = list(asks)
    return max(in_use(all_asks), for_one(all_asks))


def grown(ask: Ask) -> Ask:
    return replace(ask, kv_bytes=ask.most, preempted=False)


class PolicyBooks:
    def open(
        self,
        sizes: list[int],
        pinned: set[int],
        ttls: list[int | None],
        budget: int,
        honest: bool,
        prompt: bool,
    ) -> None:
        """honest: nothing turns out larger than was thought. prompt: the engine takes no time."""
        self.facts = {f"m{i}": ModelFacts(0, i in pinned, ttls[i]) for i in range(len(sizes))}
        self.ids = list(self.facts)
        self.budget = budget
        self.honest, self.prompt = honest, prompt
        self.policy = Policy(self.facts, budget=budget, wait_seconds=WAIT)
        self.now = 0.0
        self.tickets = 0
        self.cache = 0
        self.states = dict.fromkeys(self.ids, "unloaded")
        self.on_disk = dict(zip(self.ids, sizes, strict=True))
        self.weights = dict.fromkeys(self.ids, 0)
        """As far as is known: of a model whose files were not read yet, nothing."""
        self.beside = dict.fromkeys(self.ids, 0)
        """What stays in memory with a model."""
        self.waiting: dict[int, Ask] = {}
        self.leases: dict[int, Ask] = {}
        self.counted = 0
        self.came: dict[int, int] = {}
        self.clock = 0
        """Of the clients' turns."""
        self.ends: dict[str, int] = {}
        self.used_at: dict[str, float] = {}

    def size(self, model: str) -> int:
        return self.weights[model] + self.beside[model]

    def held(self, *, but: str = "") -> int:
        return self.models(but) + in_use(self.leases.values())

    def kept(self, *, but: str = "") -> int:
        """What is held, and what one of the leases may come to need."""
        return self.models(but) + reserved(self.leases.values())

    def models(self, but: str = "") -> int:
        there = (m for m, state in self.states.items() if state not in ("unloaded", but))
        return sum(map(self.size, there))

    def leased(self, model: str) -> bool:
        return any(model == ask.model for ask in self.leases.values())

    def evictable(self) -> list[str]:
        leased = {ask.model for ask in self.leases.values()}
        return [m for m in self.all("ready") if m not in leased and not self.facts[m].pinned]

    def stale_at(self, model: str) -> float:
        ttl = self.facts[model].ttl
        return inf if ttl is None else self.used_at[model] + ttl

    def late_at(self, ask: Ask) -> float:
        return inf if self.states[ask.model] == "loading" else ask.since + WAIT

    def due(self) -> float:
        late = [self.late_at(ask) for ask in self.waiting.values()]
        stale = [self.stale_at(model) for model in self.evictable() if not self.asked_for(model)]
        return min([*late, *stale], default=inf)

    def needs(self, asks: Iterable[Ask]) -> int:
        """What these take, side by side, of what is not held yet."""
        leases, more = list(self.leases.values()), list(asks)
        missing = {ask.model for ask in more if self.states[ask.model] in ("unloaded", "unloading")}
        others = [lease for lease in leases if lease not in more]
        running = [replace(ask, preempted=False) for ask in more]
        caches = reserved([*others, *running]) - reserved(leases)
        return caches + sum(map(self.size, missing))

    def in_turn(self) -> list[int]:
        return sorted(self.waiting, key=lambda ticket: self.waiting[ticket].turn)

    def preempted(self) -> list[int]:
        tickets = [ticket for ticket, lease in self.leases.items() if lease.preempted]
        return sorted(tickets, key=lambda ticket: self.leases[ticket].turn)

    def line(self) -> list[Ask]:
        preempted = [self.leases[ticket] for ticket in self.preempted()]
        return [*preempted, *(self.waiting[ticket] for ticket in self.in_turn())]

    def asked_for(self, model: str) -> list[int]:
        return [ticket for ticket in self.in_turn() if self.waiting[ticket].model == model]

    def all(self, state: str) -> list[str]:
        return [model for model, each in self.states.items() if each == state]

    # What always holds

    def the_views_are_true(self) -> None:
        leased = [ask.model for ask in self.leases.values()]
        for view in self.policy.models:
            model = view.id
            assert view.state == self.states[model]
            assert view.leases == leased.count(model)
            assert view.nbytes == self.size(model)
            assert view.last_used == self.used_at.get(model)
            assert not view.leases or view.state == "ready"
        assert self.policy.waiting == tuple(self.in_turn())
        assert self.policy.preempted == tuple(self.preempted())
        assert self.policy.used == self.held() + self.cache
        assert self.policy.cache == self.cache

    def memory_is_kept_to_the_budget(self) -> None:
        if self.honest:
            assert self.held() + self.cache <= self.budget
            assert self.kept() <= self.budget, "one of them could not come to its end"
        elif self.held() > self.budget:
            assert not self.cache
        if self.kept() > self.budget:
            leases = list(self.leases.values())
            assert in_use(leases) <= for_one(leases), "others could be preempted"
            assert self.kept(but="unloading") <= self.budget or not self.evictable()

    def it_is_told_when_something_is_due(self) -> None:
        assert (self.policy.next_deadline() or inf) == self.due()

    def nobody_waits_for_nothing(self) -> None:
        """Not the first; and none of them, if there is room for all, grown to their ends."""
        line, left = self.line(), self.kept(but="unloading")
        for ask in line[:1]:
            missing = left + self.needs([ask]) - self.budget
            others = sum(self.size(model) for model in self.evictable() if model != ask.model)
            assert missing <= 0 or missing > others
        firsts = {ask.model: ask for ask in reversed(line)}
        everything = sum(map(self.size, {*firsts, *self.facts}))
        ends = reserved(grown(ask) for ask in [*self.leases.values(), *self.waiting.values()])
        for ask in firsts.values() if everything + ends <= self.budget else line[:1]:
            if self.states[ask.model] in ("ready", "unloaded"):
                assert self.kept() + self.needs([ask]) > self.budget
