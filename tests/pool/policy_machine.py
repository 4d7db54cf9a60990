"""A machine that throws events at the policy in any order, and carries its actions out.

It believes nothing the policy says of itself: it keeps its own books of what is where.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from mlx_server.pool.policy import (
    TURN,
    Actions,
    FailedToLoad,
    Grant,
    LoadAction,
    NeverFits,
    Policy,
    PreemptAction,
    Refuse,
    ResumeAction,
    ShrinkCache,
    UnloadAction,
    WaitedTooLong,
)
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


TICK = 2**-10
"""Between two events, so that one was before the other."""

TURNS = 200
"""Far more than it takes to serve all who wait."""

T = TypeVar("T")

EVENTS = (
    *("requests",) * 6,
    *("release",) * 3,
    *("load_ends",) * 3,
    *("unload_ends",) * 2,
    *("time_passes",) * 2,
    *("grows",) * 5,
    "cancel",
    "cache_is_reported",
    "something_stays_beside",
    "something_rare",
    "engine_catches_up",
)
"""By how often. They are drawn as bytes, two to an event, since draws are what costs the time."""


class PolicyMachine(PolicyBooks, RuleBasedStateMachine):
    @initialize(
        sizes=st.lists(st.integers(1, 6), min_size=3, max_size=4),
        pinned=st.sets(st.integers(0, 3), max_size=2),
        ttls=st.lists(st.none() | st.integers(1, 20), min_size=4, max_size=4),
        budget=st.integers(6, 16),
        honest=st.booleans(),
        prompt=st.booleans(),
    )
    def begin(self, **world: Any) -> None:
        self.open(**world)

    # What the policy wants done

    def carry_out(self, actions: Actions) -> None:
        evictable, too_full = self.evictable(), self.kept() > self.budget
        for action in actions:
            match action:
                case LoadAction(model):
                    assert self.states[model] == "unloaded"
                    self.states[model] = "loading"
                case UnloadAction(model):
                    self.unloads(model)
                case ShrinkCache(to_bytes):
                    assert 0 <= to_bytes < self.cache
                    self.cache = to_bytes
                case Grant(ticket):
                    self.granted(ticket)
                case PreemptAction(ticket):
                    self.preempts(ticket)
                case ResumeAction(ticket):
                    self.resumed(ticket)
                case Refuse(ticket, reason):
                    self.refused(ticket, reason)
            if self.honest and not isinstance(action, Refuse | UnloadAction | PreemptAction):
                assert self.held() + self.cache <= self.budget, action
        gone = [model for model in self.all("unloading") if model in evictable]
        for_other_reasons = too_full or any(self.stale_at(model) <= self.now for model in gone)
        refused = any(isinstance(action, Refuse) for action in actions)
        if gone and not (for_other_reasons or refused):
            self.evicted(gone, [model for model in evictable if model not in gone])
        self.now += TICK
        if self.prompt:
            self.drain()

    def unloads(self, model: str) -> None:
        assert self.states[model] == "ready"
        assert not self.leased(model)
        assert not self.facts[model].pinned
        in_the_way = self.line() or self.kept() > self.budget
        assert in_the_way or self.stale_at(model) <= self.now, "it could have stayed"
        self.states[model] = "unloading"

    def evicted(self, gone: list[str], spared: list[str]) -> None:
        """For one of those who wait: enough for it, no more than that, and the oldest first."""
        left = self.kept(but="unloading")
        assert any(left + self.needs([ask]) <= self.budget for ask in self.line())
        if len(self.line()) == 1:
            (ask,) = self.line()
            newest = max(gone, key=lambda model: self.used_at[model])
            for model in gone:
                assert left + self.needs([ask]) + self.size(model) > self.budget
            for model in spared:
                older = model != ask.model and self.used_at[model] < self.used_at[newest]
                assert not older or self.size(model) < self.size(newest)

    def granted(self, ticket: int) -> None:
        ask = self.waiting[ticket]
        assert self.states[ask.model] == "ready"
        assert self.asked_for(ask.model)[0] == ticket, "in turns, and of one client in order"
        assert not self.preempted(), "they go on first"
        assert self.kept() + self.needs([ask]) <= self.budget
        if self.honest:
            self.passed(ticket)
        del self.waiting[ticket]
        self.counted += 1
        self.clock = max(self.clock, ask.turn[0]) + 1
        self.leases[ticket] = replace(ask, granted=self.counted)
        self.used_at[ask.model] = self.now

    def passing(self, ticket: int) -> list[int]:
        """Leases that were granted while it waited, and it was its turn."""
        came, turn = self.came[ticket], self.waiting[ticket].turn
        leases = self.leases.items()
        return [other for other, each in leases if each.granted > came and each.turn > turn]

    def passed(self, ticket: int) -> None:
        """Those before it still fit next to all that is granted past them, and what is pinned."""
        there = {m for m in self.all("ready") + self.all("loading") if self.facts[m].pinned}
        turn = self.waiting[ticket].turn
        ahead = {number: ask for number, ask in self.waiting.items() if ask.turn < turn}
        pinned = there | {ask.model for ask in ahead.values() if self.facts[ask.model].pinned}
        for number, ask in ahead.items():
            later = [grown(self.leases[other]) for other in self.passing(number)]
            asks = [ask, grown(self.waiting[ticket]), *later]
            models = pinned | {each.model for each in asks}
            assert reserved(asks) + sum(map(self.size, models)) <= self.budget

    def preempts(self, ticket: int) -> None:
        running = {number: each for number, each in self.leases.items() if not each.preempted}
        assert len(running) > 1, "one goes on to its end"
        assert max(running, key=lambda number: running[number].turn) == ticket
        assert self.kept() > self.budget, "there was room"
        self.leases[ticket] = replace(self.leases[ticket], preempted=True)

    def resumed(self, ticket: int) -> None:
        assert self.preempted()[0] == ticket
        needs = self.needs([self.leases[ticket]])
        assert not needs or self.kept() + needs <= self.budget
        self.leases[ticket] = replace(self.leases[ticket], preempted=False)

    def refused(self, ticket: int, reason: object) -> None:
        ask = self.waiting[ticket]
        match reason:
            case NeverFits(needed, available):
                stay = (m for m, facts in self.facts.items() if facts.pinned and m != ask.model)
                pinned = sum(self.size(m) for m in stay if self.states[m] in ("loading", "ready"))
                assert needed == self.size(ask.model) + reserved([ask])
                assert needed > available == self.budget - pinned
            case WaitedTooLong(seconds):
                assert seconds == self.now - ask.since >= WAIT
                assert self.states[ask.model] != "loading"
            case FailedToLoad(failed):
                assert failed == ask.model
                assert self.states[ask.model] == "unloaded"
        del self.waiting[ticket]

    # What clients, the engine, the owner and the clock do

    @rule(events=st.binary(min_size=2, max_size=40))
    def happen(self, events: bytes) -> None:
        for what, pick in zip(events[::2], events[1::2], strict=False):
            event = EVENTS[what % len(EVENTS)]
            note(f"    {event}({pick})")
            getattr(self, event)(pick)
            self.the_views_are_true()
            self.memory_is_kept_to_the_budget()
            self.it_is_told_when_something_is_due()
            self.nobody_waits_for_nothing()

    def requests(self, pick: int) -> None:
        ask = ask_of(pick, self.ids, self.now)
        self.read_files(ask.model)
        self.tickets += 1
        self.counted += 1
        self.came[self.tickets] = self.counted
        begins = max(self.clock, self.ends.get(ask.client, 0))
        self.ends[ask.client] = begins + TURN * ask.rows
        self.waiting[self.tickets] = replace(ask, turn=(begins, self.counted))
        self.carry_out(
            self.policy.request(
                self.tickets,
                ask.model,
                ask.kv_bytes,
                self.now,
                most_kv_bytes=ask.most,
                rows=ask.rows,
                padding_bytes=ask.padding,
                extra_bytes=ask.beside,
                client=ask.client,
            )
        )

    def grows(self, pick: int) -> None:
        """A row has more tokens; or it has come to its end, and the next is not there yet."""
        pick, how = divmod(pick, 4)
        running = [ticket for ticket, each in self.leases.items() if not each.preempted]
        for ticket in among(running, pick):
            lease = self.leases[ticket]
            kv_bytes = (lease.kv_bytes + 1, lease.kv_bytes + 1, lease.most, 0)[how]
            self.leases[ticket] = replace(lease, kv_bytes=min(kv_bytes, lease.most))
            self.carry_out(self.policy.resize(ticket, kv_bytes, self.now))

    def read_files(self, model: str) -> None:
        if not self.weights[model]:
            self.weights[model] = self.on_disk[model]
            self.policy.estimate(model, self.weights[model])

    def release(self, pick: int) -> None:
        for ticket in among(list(self.leases), pick):
            self.end(ticket)

    def end(self, ticket: int) -> None:
        self.used_at[self.leases.pop(ticket).model] = self.now
        self.carry_out(self.policy.release(ticket, self.now))

    def cancel(self, pick: int) -> None:
        for ticket in among(list(self.waiting), pick):
            del self.waiting[ticket]
            self.carry_out(self.policy.cancel(ticket, self.now))

    def load_ends(self, pick: int) -> None:
        pick, difference = divmod(pick, 8)
        for model in among(self.all("loading"), pick):
            self.fail_load(model) if difference > 5 else self.finish_load(model, difference - 2)

    def finish_load(self, model: str, difference: int) -> None:
        thought = self.weights[model]
        nbytes = max(1, self.on_disk[model] + difference)
        self.states[model] = "ready"
        self.weights[model] = min(nbytes, thought) if self.honest else nbytes
        self.used_at[model] = self.now
        self.carry_out(self.policy.loaded(model, self.weights[model], self.now))

    def fail_load(self, model: str) -> None:
        self.states[model] = "unloaded"
        self.carry_out(self.policy.load_failed(model, self.now))
        assert not self.asked_for(model)

    def unload_ends(self, pick: int) -> None:
        for model in among(self.all("unloading"), pick):
            self.finish_unload(model)

    def finish_unload(self, model: str) -> None:
        self.states[model] = "unloaded"
        self.beside[model] = 0
        self.carry_out(self.policy.unloaded(model, self.now))

    def cache_is_reported(self, pick: int) -> None:
        self.cache = pick % 13
        self.carry_out(self.policy.cache_bytes(self.cache))

    def something_stays_beside(self, pick: int) -> None:
        pick, nbytes = divmod(pick, 6)
        for model in among([] if self.honest else self.all("ready"), pick):
            self.beside[model] = nbytes
            self.carry_out(self.policy.set_extra_bytes(model, nbytes, self.now))

    def something_rare(self, pick: int) -> None:
        pick, what = divmod(pick, 6)
        (model,) = among(self.ids, pick)
        match what:
            case 0:
                self.lose_engine()
            case 1 | 2:
                self.preload(model)
            case 3 if not self.asked_for(model):
                self.look_again(model, pick % 3)

    def lose_engine(self) -> None:
        self.states = dict.fromkeys(self.ids, "unloaded")
        self.beside = dict.fromkeys(self.ids, 0)
        void, self.leases, self.cache = self.leases, {}, 0
        self.carry_out(self.policy.engine_lost(self.now))
        for ticket in void:
            self.carry_out(self.policy.release(ticket, self.now))

    def preload(self, model: str) -> None:
        self.read_files(model)
        absent, alone = self.states[model] == "unloaded", not self.line()
        only_preloaded = absent and not self.asked_for(model) and not self.prompt
        fits = self.kept() + self.size(model) <= self.budget
        self.carry_out(self.policy.preload(model, self.now))
        if only_preloaded and self.states[model] == "loading":
            wanted = self.needs(self.line())
            assert self.kept(but="unloading") + wanted <= self.budget, "others wait for that"
        if only_preloaded and alone:
            assert (self.states[model] == "loading") == fits

    def look_again(self, model: str, less: int) -> None:
        """At files that have changed, which is no news of a model that is there."""
        nbytes = max(1, self.on_disk[model] - less)
        self.policy.estimate(model, nbytes)
        if self.states[model] == "unloaded":
            self.weights[model] = nbytes

    def time_passes(self, pick: int) -> None:
        """Some, or until something is due, which is then done."""
        if pick % 4:
            self.now += (0.5, 2.0, 17.0)[pick % 3]
        else:
            self.now = now = max(self.now, self.policy.next_deadline() or 0.0)
            self.carry_out(self.policy.tick(now))
            assert self.due() > now

    def engine_catches_up(self, pick: int) -> None:
        self.drain()

    def drain(self, ends: Callable[[int], bool] = lambda ticket: False) -> None:
        """The engine does all it was asked to; leases for which `ends` holds come to their end."""
        for _ in range(TURNS):
            if loading := self.all("loading"):
                self.finish_load(loading[0], 0)
            elif unloading := self.all("unloading"):
                self.finish_unload(unloading[0])
            elif leases := [ticket for ticket in self.leases if ends(ticket)]:
                self.end(leases[0])
            else:
                return
        raise AssertionError("it goes round in circles")

    def teardown(self) -> None:
        """Nobody waits for ever, and nobody for those that were granted past him, however long
        these stay; what was preempted goes on to its end."""
        if hasattr(self, "policy"):
            for ticket in self.in_turn() if self.honest else ():
                stay = self.passing(ticket) if ticket in self.waiting else []
                self.drain(lambda lease, stay=stay: lease not in stay)  # type: ignore[misc]
                assert ticket not in self.waiting
            self.drain(lambda lease: not self.leases[lease].preempted)
            assert not self.waiting
            assert not self.leases
            assert set(self.states.values()) <= {"ready", "unloaded"}
            assert self.policy.used == self.held() + self.cache


def among(options: Sequence[T], pick: int) -> Sequence[T]:
    """One of them, or none where there are none."""
    return [options[pick % len(options)]] if options else []
