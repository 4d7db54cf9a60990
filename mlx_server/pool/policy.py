"""Decides which models are in memory, which requests wait, and what is evicted.

Events go in and actions come out; nothing here has side effects or reads a clock. The budget covers
the models' weights, the KV caches that granted tickets reserve, and what can be freed at once: the
prompt cache and idle adapters.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_server import limits
from mlx_server.fair_queue import FairQueue, of_tier
from mlx_server.pool.reservations import (
    Granted,
    ModelFacts,
    Reservation,
    ReservedMemory,
    ResidentModel,
    ResidentModels,
    Ticket,
    WaitQueue,
    victims,
)
from mlx_server.requests import Tier


@dataclass(frozen=True)
class LoadAction:
    model: str


@dataclass(frozen=True)
class UnloadAction:
    model: str


@dataclass(frozen=True)
class ShrinkCache:
    to_bytes: int


@dataclass(frozen=True)
class Grant:
    ticket: Ticket


@dataclass(frozen=True)
class PreemptAction:
    """The ticket's rows must pause and free their memory until a `ResumeAction`."""

    ticket: Ticket


@dataclass(frozen=True)
class ResumeAction:
    ticket: Ticket


@dataclass(frozen=True)
class NeverFits:
    needed: int
    available: int
    """The bytes of the budget that other models, which must stay, do not occupy."""


@dataclass(frozen=True)
class WaitedTooLong:
    seconds: float


@dataclass(frozen=True)
class FailedToLoad:
    model: str


Reason = NeverFits | WaitedTooLong | FailedToLoad


@dataclass(frozen=True)
class Refuse:
    ticket: Ticket
    reason: Reason


Action = LoadAction | UnloadAction | ShrinkCache | Grant | PreemptAction | ResumeAction | Refuse
Actions = tuple[Action, ...]


TURN = 64
"""The virtual time that one row takes. A grant advances the clock by at least one, so a waiting
reservation is passed by at most this many newcomers for each row that its client queued before
it."""


class Policy:
    """Each event is a method that returns the actions to carry out now, in this order.

    Actions after a `ShrinkCache` rely on the memory that it frees. After `engine_lost`, results of
    actions that the lost engine was carrying out must not be reported.
    """

    def __init__(
        self,
        models: Mapping[str, ModelFacts],
        *,
        budget: int,
        wait_seconds: float,
        tier_wait: float = float(limits.TIER_WAIT_SECONDS),
    ) -> None:
        self.budget = budget
        self.wait_seconds = wait_seconds
        self.tier_wait = tier_wait
        self.lowered = 0
        """The bytes by which `lower` has reduced the budget."""
        self.returning = 0
        """The bytes by which the budget will grow when other servers have ended that are leaving.
        Requests wait for them, however long that takes."""
        self.cache = 0
        """The bytes of the prompt cache and idle adapters, after the actions returned so far."""
        self.models = ResidentModels(models)
        """What is known of each model; only the events here may change it."""
        self._waiting: list[Reservation] = []
        self._granted = Granted()
        self._turns = FairQueue()
        self._clock = itertools.count(1)
        """Counts requests and grants, so that their order can be compared."""
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
        padding_bytes: int | None = None,
        extra_bytes: int = 0,
        client: str = "",
        tier: Tier = Tier.DEFAULT,
    ) -> Actions:
        """Requests a lease on the model, which lasts from `Grant` to `release`.

        It covers the KV caches of `rows` rows, the longest of which takes `kv_bytes` soon and
        `most_kv_bytes` at its end, and `extra_bytes` for an adapter.
        padding_bytes: the most that the model's rows are padded by; None: each to the longest.
        """
        assert ticket not in self._granted
        assert ticket not in self.waiting
        most, came = max(kv_bytes, most_kv_bytes), next(self._clock)
        client = of_tier(client, tier)
        turn = tier, self._turns.time(client), came
        self._turns.charge(client, TURN * rows)
        memory = kv_bytes, most, padding_bytes, extra_bytes
        self._waiting.append(Reservation(ticket, model, rows, *memory, now, turn, came, now))
        return self.tick(now)

    def resize(self, ticket: Ticket, kv_bytes: int, now: float) -> Actions:
        """Sets the bytes that the longest row of a granted ticket takes from now on.

        If there is no room for them, the rows last in turn are preempted, maybe the ticket's own.
        """
        if (reservation := self._granted.get(ticket)) is None:
            return ()  # the engine was lost
        reservation.kv_bytes = min(kv_bytes, reservation.most_kv_bytes)
        return self.tick(now)

    def begin(self, ticket: Ticket) -> None:
        """Records that the engine has rows of a granted ticket, which use memory from now on."""
        if reservation := self._granted.get(ticket):
            reservation.begun = True

    def release(self, ticket: Ticket, now: float) -> Actions:
        """Ends a lease; a ticket that became void when the engine was lost is ignored."""
        if (reservation := self._granted.pop(ticket, None)) is not None:
            model = self.models[reservation.model]
            model.leases -= 1
            model.last_used = now
        return self.tick(now)

    def cancel(self, ticket: Ticket, now: float) -> Actions:
        """Removes a waiting ticket. A load that was begun for it continues."""
        self._waiting = [each for each in self._waiting if each.ticket != ticket]
        return self.tick(now)

    def loaded(self, model: str, nbytes: int, now: float) -> Actions:
        self.models[model].enter("ready", before="loading")
        self.models[model].weights = nbytes
        self.models[model].last_used = now
        return self.tick(now)

    def set_extra_bytes(self, model: str, nbytes: int, now: float) -> Actions:
        """Sets the bytes of the model's adapters that can't be dropped and no lease reserved."""
        self.models[model].extra_bytes = nbytes
        return self.tick(now)

    def load_failed(self, model: str, now: float) -> Actions:
        """Refuses all tickets that wait for the model; a later request loads it again."""
        self.models[model].enter("unloaded", before="loading")
        for each in [each for each in self._waiting if each.model == model]:
            self._refuse(each, FailedToLoad(model))
        return self.tick(now)

    def unloaded(self, model: str, now: float) -> Actions:
        """Records that the model's memory has been freed."""
        self.models[model].enter("unloaded", before="unloading")
        self.models[model].extra_bytes = 0
        self.models[model].requested_ttl = None
        return self.tick(now)

    def keep(self, model: str, seconds: float, now: float) -> Actions:
        """Sets the seconds that the model stays in memory without a request, in place of `ttl`."""
        if self.models[model].is_present:
            self.models[model].requested_ttl = seconds
        return self.tick(now)

    def cache_bytes(self, nbytes: int) -> Actions:
        """Sets the bytes of the prompt cache and idle adapters, for which no request ever waits."""
        self.cache = nbytes
        self._shrink_cache(0)
        return self._taken()

    def engine_lost(self, now: float) -> Actions:
        """Records that no model is in memory and voids all leases; waiting tickets keep waiting."""
        self._granted.clear()
        self.cache = 0
        for model in self.models:
            model.forget()
        return self.tick(now)

    def preload(self, model: str, now: float) -> Actions:
        """Loads the model if it fits in memory that no request waits for. It evicts nothing."""
        queue = self._serve(now)
        room = 0 if queue.stuck else min(self._free, self._free_soon - queue.promised)
        if self.models[model].state == "unloaded" and self.models[model].nbytes <= room:
            self._load(self.models[model])
        return self.tick(now)

    def estimate(self, model: str, nbytes: int) -> None:
        """Sets the estimated weight bytes of a model whose files have now been read."""
        if self.models[model].state == "unloaded":
            self.models[model].weights = nbytes

    def lower(self, now: float) -> Actions:
        """Lowers the budget until the next start, since memory ran out within it.

        The part for caches is halved; the weights in memory still fit.
        """
        less = max(0, self.budget - self.models.nbytes) // 2
        self.budget -= less
        self.lowered += less
        return self.tick(now)

    def limit(self, budget: int, now: float, returning: int = 0) -> Actions:
        """Sets another budget, of which the part that memory ran out within is left out again."""
        self.budget, self.returning = max(0, budget - self.lowered), returning
        return self.tick(now)

    def next_deadline(self) -> float | None:
        """The time at which `tick` is due if no other event comes before; None if it never is."""
        due = [self._late_at(each) for each in self._waiting]
        due += [each.stopped_at + self.tier_wait for each in self._below]
        due += [self.stale_at(model.id) for model in self.models]
        return min((at for at in due if at is not None), default=None)

    def stale_at(self, id: str) -> float | None:
        """The time at which the model is unloaded if no request uses it before."""
        model = self.models[id]
        if not model.evictable or model.ttl is None or model.last_used is None:
            return None
        wanted = any(each.model == id for each in self._waiting)
        return None if wanted or math.isinf(model.ttl) else model.last_used + model.ttl

    def room(self, model: str) -> int:
        """The bytes that rows of the model can take if there are no other rows."""
        return self._available(self.models[model]) - self.models[model].nbytes

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        return tuple(each.ticket for each in self._waiting)

    @property
    def preempted(self) -> tuple[Ticket, ...]:
        return tuple(each.ticket for each in self._granted.preempted)

    @property
    def kv_reserved(self) -> int:
        return self._granted.reserved.now

    @property
    def used(self) -> int:
        return self.models.nbytes + self.kv_reserved + self.cache

    @property
    def in_use(self) -> int:
        """The bytes of models and of rows that the engine has. The cache gives way to granted rows
        only when they begin, since it may have the beginning of their prompts."""
        return self.models.nbytes + self._granted.in_use

    @property
    def _free(self) -> int:
        """The free bytes, with the cache's; negative if reservations have grown or a model is
        larger than estimated."""
        return self.budget - self.models.nbytes - self._granted.reserved.nbytes

    @property
    def _free_soon(self) -> int:
        return self._free + self.models.unloading

    @property
    def _below(self) -> list[Reservation]:
        """The reservations of lower tiers that wait or are preempted."""
        stopped = [*self._granted.preempted, *self._waiting]
        return [each for each in stopped if each.turn[0] > Tier.DEFAULT]

    def tick(self, now: float) -> Actions:
        """Does what is due by now. Each event ends with it; it is an event of its own at
        `next_deadline`."""
        for each in self._below:
            if now >= each.stopped_at + self.tier_wait:
                each.turn = Tier.DEFAULT, *each.turn[1:]
        self._waiting.sort(key=lambda each: each.turn)
        self._preempt(now)
        self._shrink_cache(0)
        self._serve(now)
        if self._refuse_late(now):
            self._serve(now)
        for model in self.models:
            if (at := self.stale_at(model.id)) is not None and at <= now:
                self._unload(model)
        if idle := self.models.evictable():
            self._evict(-self._free_soon, idle)
        return self._taken()

    def _preempt(self, now: float) -> None:
        """Preempts the rows last in turn until the others have room to grow; never the first."""
        while self._free < 0 and self._granted.reserved.can_be_less:
            last = self._granted.running[0]
            last.preempted, last.stopped_at = True, now
            self._actions.append(PreemptAction(last.ticket))

    def _serve(self, now: float) -> WaitQueue:
        """Resumes, grants, loads and evicts in order; returns those that still wait.

        Tiers are served one after the other. In each, preempted reservations come first, and no
        request is granted while one of them waits. Then waiting requests are served in turns by
        client, and in order of arrival within one client. Rows of lower tiers are preempted for
        them.

        No request starves. A later request gets only memory that is not promised to an earlier one.
        It passes the earlier one only if that one would still fit next to the pinned models and all
        later reservations that passed it, grown to their ends. So no request waits for the lease of
        a later one.

        There is no deadlock. Memory is kept in which any one granted reservation can reach its end,
        and the first one always runs. Loads and unloads end by themselves, idle models are evicted,
        and a request that would not fit even then is refused.
        """
        queue = WaitQueue(self.models, self._granted, self.budget)
        stopped = [*self._granted.preempted, *self._waiting]
        for reservation in sorted(stopped, key=lambda each: each.turn[0]):
            if not reservation.preempted and (misfit := self._refusal_reason(reservation)):
                self._refuse(reservation, misfit)
            elif self._may_grant(reservation, queue) or self._takes(reservation, queue, now):
                self._resume(reservation) if reservation.preempted else self._grant(
                    reservation, now
                )
            else:
                self._wait_in(queue, reservation)
        return queue

    def _refusal_reason(self, reservation: Reservation) -> NeverFits | None:
        model = self.models[reservation.model]
        alone, available = ReservedMemory([reservation]).nbytes, self._available(model)
        needed = model.nbytes + alone
        return NeverFits(needed, available) if needed > available else None

    def _available(self, model: ResidentModel) -> int:
        """The bytes that the model and its rows can take next to the models that must stay."""
        return self.budget + self.returning - self.models.pinned_next_to(model)

    def _may_grant(self, reservation: Reservation, queue: WaitQueue) -> bool:
        return (
            self.models[reservation.model].state == "ready"
            and reservation.model not in queue.models
            and self._has_room(reservation, queue)
            and queue.let_pass(reservation)
        )

    def _takes(self, reservation: Reservation, queue: WaitQueue, now: float) -> bool:
        """Preempts rows of lower tiers if the reservation may be granted then."""
        lower = [each for each in self._granted.running if each.turn[0] > reservation.turn[0]]
        for count, last in enumerate(lower, 1):
            last.preempted = True
            if self._may_grant(reservation, queue):
                for each in lower[:count]:
                    each.stopped_at = now
                    self._actions.append(PreemptAction(each.ticket))
                return True
        for each in lower:
            each.preempted = False
        return False

    def _has_room(self, reservation: Reservation, queue: WaitQueue) -> bool:
        """Whether the reservation fits next to the granted ones and to those queued before it."""
        more = self._granted.reserved.more(reservation)
        if reservation.preempted and not more:
            return True  # it continues in the memory that is kept for one reservation
        with_queue = queue.more(reservation)
        return more <= self._free and max(more, with_queue) <= self._free_soon - queue.promised

    def _wait_in(self, queue: WaitQueue, reservation: Reservation) -> None:
        """Queues it. Loads its model, or evicts others, as soon as no lease has to end first."""
        model = self.models[reservation.model]
        if not queue.stuck:
            room, keep = queue.promised + queue.needs(reservation), {*queue.models, model.id}
            queue.stuck = not self._make_room(room, keep)
        if not queue.stuck:
            if model.state == "unloaded" and model.nbytes <= self._free:
                self._load(model)
            queue.promise(reservation)
        queue.add(reservation)

    def _make_room(self, room: int, keep: set[str]) -> bool:
        """Evicts idle models to free `room` bytes; none, and returns False, if that can't do."""
        missing = room - self._free_soon
        idle = self.models.evictable(keep)
        if missing > sum(model.nbytes for model in idle):
            return False
        self._evict(missing, idle)
        return True

    def _evict(self, missing: int, idle: list[ResidentModel]) -> None:
        for model in victims(missing, idle):
            self._unload(model)

    def _grant(self, reservation: Reservation, now: float) -> None:
        self._shrink_cache(self._granted.reserved.more_now(reservation))
        self._waiting.remove(reservation)
        reservation.granted = next(self._clock)
        self._granted[reservation.ticket] = reservation
        self._turns.advance(max(self._turns.now, reservation.turn[1]) + 1)
        model = self.models[reservation.model]
        model.leases += 1
        model.last_used = now
        self._actions.append(Grant(reservation.ticket))

    def _resume(self, reservation: Reservation) -> None:
        self._shrink_cache(self._granted.reserved.more_now(reservation))
        reservation.preempted = False
        self._actions.append(ResumeAction(reservation.ticket))

    def _refuse(self, reservation: Reservation, reason: Reason) -> None:
        self._waiting.remove(reservation)
        self._actions.append(Refuse(reservation.ticket, reason))

    def _load(self, model: ResidentModel) -> None:
        self._shrink_cache(model.nbytes)
        model.state = "loading"
        self._actions.append(LoadAction(model.id))

    def _unload(self, model: ResidentModel) -> None:
        model.state = "unloading"
        self._actions.append(UnloadAction(model.id))

    def _shrink_cache(self, room: int) -> None:
        over = self.used + room - self.budget
        if over > 0 and self.cache:
            self.cache = max(0, self.cache - over)
            self._actions.append(ShrinkCache(self.cache))

    def _refuse_late(self, now: float) -> bool:
        due = ((each, self._late_at(each)) for each in self._waiting)
        late = [each for each, at in due if at is not None and at <= now]
        for each in late:
            self._refuse(each, WaitedTooLong(now - each.requested_at))
        return bool(late)

    def _late_at(self, reservation: Reservation) -> float | None:
        """The time at which the request is refused; None while its model loads, however long."""
        if self.returning or self.models[reservation.model].state == "loading":
            return None
        return reservation.requested_at + self.wait_seconds

    def _taken(self) -> Actions:
        actions, self._actions = tuple(self._actions), []
        return actions
