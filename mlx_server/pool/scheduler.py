"""Carries out the policy's decisions on leases, their memory, loads, unloads and evictions."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from copy import copy
from itertools import count
from time import monotonic
from typing import Any

from mlx_server.engine.client import EngineClient
from mlx_server.engine.device_errors import Streak
from mlx_server.engine.messages import DeviceFailed, LimitCache, LimitMemory, StepOutput
from mlx_server.errors import (
    EngineDied,
    ModelReplaced,
    NotEnoughMemory,
    Overloaded,
    ServerError,
    Unavailable,
)
from mlx_server.pool.adapters import AdapterPool, LeasedAdapter, catalog_of
from mlx_server.pool.lease import Lease, Leases, MemoryDemand, Waiter
from mlx_server.pool.memory import size
from mlx_server.pool.models import LoadedModel, ModelPreparation, PoolEntry
from mlx_server.pool.policy import (
    Actions,
    FailedToLoad,
    Grant,
    LoadAction,
    NeverFits,
    Policy,
    PreemptAction,
    Reason,
    Refuse,
    ResumeAction,
    ShrinkCache,
    UnloadAction,
    WaitedTooLong,
)
from mlx_server.pool.prepare import PreparedModel
from mlx_server.pool.reservations import Ticket


class BackgroundWork:
    """Tasks of the pool that it can cancel."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ended(self) -> None:
        """Returns when there is none, with what they have begun themselves."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        await cancelled(self._tasks)


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until they have ended, whatever they raise."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def refusal_of(reason: Reason, entry: PoolEntry, policy: Policy, origin: str) -> ServerError:
    """The error for the client. origin: the source of the memory budget, for the message."""
    match reason:
        case NeverFits(needed, available):
            model = policy.models[entry.spec.id].nbytes
            return _too_large(needed, available, model, policy.budget, origin)
        case WaitedTooLong(seconds):
            return Overloaded(
                f"No memory became free in {seconds:.0f} seconds. Send the request again later."
            )
        case FailedToLoad():
            assert entry.failure is not None
            return copy(entry.failure)


def _too_large(
    needed: int, available: int, model: int, budget: int, origin: str
) -> NotEnoughMemory:
    alone, pinned = model > available, budget - available
    what = f"The model needs {size(model)}"
    if not alone:
        what += f", and this request {size(needed - model)} more"
    limit = f"the memory budget is {size(budget)} ({origin})"
    if pinned:
        limit += f", of which pinned models keep {size(pinned)}"
    choose = "choose a smaller quantisation" if alone else "ask for fewer tokens"
    return NotEnoughMemory(f"{what}; {limit}. Raise `memory_budget` in models.yaml, or {choose}.")


log = logging.getLogger("mlx_server.pool")


class MemoryScheduler:
    def __init__(
        self,
        models: Mapping[str, PoolEntry],
        preparation: ModelPreparation,
        policy: Policy,
        engine: Callable[[], EngineClient],
        on_ready: Callable[[PreparedModel], None],
        on_memory: Callable[[], None],
        claim: Callable[[], Coroutine[None, None, None]],
    ) -> None:
        """on_ready: called with each model that has been loaded.
        on_memory: called whenever the bytes in use may have changed.
        claim: called before a model is loaded; raises Overloaded if its memory is gone."""
        self._models = models
        self._preparation = preparation
        self.policy = policy
        self.budget_origin = ""
        """The source of the memory budget, for the error messages of refused requests."""
        self._engine = engine
        self._on_ready = on_ready
        self._on_memory = on_memory
        self._claim = claim
        self._tickets = count()
        self.waiting: dict[Ticket, Waiter] = {}
        self.leases = Leases(engine, self._begin, self._resize)
        self.adapters = AdapterPool(engine, self._count_adapters)
        self.timer: asyncio.TimerHandle | None = None
        self.background = BackgroundWork()
        self._cache_bytes = 0
        """The bytes of the prompt cache, as the engine last reported them."""
        self._cache_limit: int | None = None
        """The last limit that was sent to this engine; None if it has to be sent again."""
        self._out_of_memory = Streak()
        self._closed: ServerError | None = None

    def close(self, error: ServerError) -> None:
        """Refuses all waiting and later requests with `error`."""
        self._closed = error
        if self.timer:
            self.timer.cancel()
        for waiter in self.waiting.values():
            waiter.refuse(copy(error))

    @asynccontextmanager
    async def lease(
        self, prepared: PreparedModel, demand: MemoryDemand, adapter: LeasedAdapter | None = None
    ) -> AsyncIterator[Lease]:
        """Keeps the model and the adapter loaded, with memory for the rows, until the block is
        left. It waits for the memory. Raises ServerError if the request is refused."""
        self.check_open()
        _ = self._engine()  # raises if there is no engine, which could not load the model
        ticket = next(self._tickets)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(self._models[prepared.id], demand, granted)
        self.waiting[ticket] = waiter
        try:
            self.do(
                self.policy.request(
                    ticket,
                    prepared.id,
                    demand.nbytes(demand.soon),
                    now(),
                    most_kv_bytes=demand.nbytes(demand.most_tokens),
                    rows=demand.rows,
                    padding_bytes=demand.padding_bytes,
                    extra_bytes=adapter.spec.nbytes if adapter else 0,
                    client=demand.client,
                    tier=demand.tier,
                )
            )
            await waiter.granted
            lease = self.leases[ticket]
            if lease.model.prepared is not prepared:  # the prompt was tokenized for the old files
                raise ModelReplaced(
                    f"The files of {prepared.id} were replaced while the request waited. Send it "
                    "again."
                )
            if adapter and adapter.by_client:
                catalog_of(prepared).check_there(adapter.spec.name)
            async with self.adapters.lease(prepared.id, adapter) if adapter else nullcontext():
                yield lease
        finally:
            end = self.policy.cancel if self.waiting.pop(ticket, None) else self.policy.release
            self.do(end(ticket, now()))
            self.leases.remove(ticket)

    def _begin(self, ticket: Ticket) -> None:
        self.policy.begin(ticket)
        self.limit_cache()

    def _resize(self, ticket: Ticket, kv_bytes: int) -> None:
        self.do(self.policy.resize(ticket, kv_bytes, now()))

    def check_open(self) -> None:
        if self._closed:
            raise copy(self._closed)

    def device_failed(self, failure: DeviceFailed) -> None:
        if failure.kind != "out_of_memory" or self._out_of_memory.failed(now()) < 2:
            return
        before = self.policy.budget
        self.do(self.policy.lower(now()))
        log.warning(
            "memory ran out %d times in a row: the budget is %s instead of %s until the next "
            "start. Close other programs, or lower `memory_budget` under `server` in models.yaml.",
            self._out_of_memory.length,
            size(self.policy.budget),
            size(before),
        )
        with suppress(EngineDied):
            self._engine().send(LimitMemory(self.policy.budget))

    def stepped(self, step: StepOutput) -> None:
        if any(token.finish for token in step.tokens):
            self._out_of_memory.answered()
        self.leases.count_tokens(step.tokens)
        self._cache_bytes = step.cache_bytes
        if self._cache_bytes > (self._cache_limit or 0):
            self._cache_limit = None  # finished rows added their caches
        self._count_idle()

    def _count_adapters(self) -> None:
        for id in [id for id, entry in self._models.items() if entry.model]:
            self.do(self.policy.set_extra_bytes(id, self.adapters.unreserved_bytes(id), now()))
        self._count_idle()

    def _count_idle(self) -> None:
        """Reports the bytes that can be freed as soon as a request needs them. Most steps change
        nothing, so it compares them first."""
        idle = self._cache_bytes + self.adapters.idle_bytes
        if idle != self.policy.cache:
            self.do(self.policy.cache_bytes(idle))

    def engine_lost(self) -> None:
        self.background.cancel()  # a load that has ended must not report its result any more
        for entry in self._models.values():
            entry.model = entry.progress = None
        self._cache_bytes, self._cache_limit = 0, None
        self.adapters.forget()
        for ticket, waiter in self.waiting.items():
            self.policy.cancel(ticket, now())
            waiter.refuse(EngineDied("The engine process was lost. Send the request again."))
        self.do(self.policy.engine_lost(now()))

    def do(self, wanted: Actions) -> None:
        if self._closed:
            return
        for action in wanted:
            match action:
                case LoadAction(model):
                    self.background.begin(self._load(self._models[model]))
                case UnloadAction(model):
                    self.background.begin(self._unload(self._models[model]))
                case ShrinkCache(to_bytes):
                    self._shrink(to_bytes)
                case Grant(ticket):
                    self._grant(ticket)
                case PreemptAction(ticket):
                    self.limit_cache()  # the prompt cache may keep the preempted rows' caches
                    self.leases.preempt(ticket)
                case ResumeAction(ticket):  # before the limit, which may drop their caches
                    self.leases.resume(ticket)
                case Refuse(ticket, reason):
                    waiter = self.waiting.pop(ticket)
                    waiter.refuse(refusal_of(reason, waiter.entry, self.policy, self.budget_origin))
        self.limit_cache()
        self._set_timer()
        self._on_memory()

    def _grant(self, ticket: Ticket) -> None:
        waiter = self.waiting.pop(ticket)
        assert waiter.entry.model is not None
        self.leases.add(waiter.entry.model, waiter.demand, ticket)
        waiter.grant()

    def _shrink(self, to_bytes: int) -> None:
        """Drops idle adapters above `to_bytes`, and leaves the rest of it to the prompt cache."""
        self.adapters.shrink(to_bytes)
        self._cache_bytes = min(self._cache_bytes, max(0, to_bytes - self.adapters.idle_bytes))

    def limit_cache(self) -> None:
        """Limits the engine's prompt cache to what models and rows leave, before the freed memory
        is used. Rows are sent before the limit, so that the entries they continue stay."""
        others = self.policy.in_use + self.adapters.idle_bytes
        if (most := max(0, self.policy.budget - others)) != self._cache_limit:
            with suppress(EngineDied):
                self._engine().send(LimitCache(most))
                self._cache_limit = most

    async def _load(self, entry: PoolEntry) -> None:
        prepared = entry.prepared
        assert prepared is not None
        report = self._preparation.reporter(entry)
        entry.failure = None
        try:
            await self._claim()
            loaded = await self._preparation.load(prepared, report)
        except Exception as error:
            is_other = isinstance(error, ModelReplaced | Overloaded)
            if is_other or not isinstance(error, Unavailable):
                self._preparation.failed(entry, error)
                self.do(self.policy.load_failed(prepared.id, now()))
            return  # else the engine was lost, after which `engine_lost` cleans up, or is stopping
        log.info(
            "%s is ready: family %s, %d MB",
            prepared.id,
            prepared.family.name,
            loaded.nbytes / 1e6,
        )
        if loaded.why_alone:
            log.warning("%s answers one request at a time: %s", prepared.id, loaded.why_alone)
        entry.batching = not loaded.why_alone
        entry.model = LoadedModel(prepared, loaded.vocabulary, loaded.nbytes)
        entry.progress = None
        self.do(self.policy.loaded(prepared.id, loaded.nbytes + prepared.tower_bytes, now()))
        self._on_ready(prepared)

    async def _unload(self, entry: PoolEntry) -> None:
        entry.model = None
        self.adapters.forget(entry.spec.id)
        with suppress(Unavailable):
            await self._engine().unload(entry.spec.id)
            log.info("%s was unloaded", entry.spec.id)
            self.do(self.policy.unloaded(entry.spec.id, now()))

    def _set_timer(self) -> None:
        if self.timer:
            self.timer.cancel()
        at = self.policy.next_deadline()
        loop = asyncio.get_running_loop()
        self.timer = None if at is None else loop.call_later(at - now(), self._tick)

    def _tick(self) -> None:
        self.do(self.policy.tick(now()))


def now() -> float:
    """Not uvloop's clock, which goes on while a Mac sleeps: those who wait would be refused."""
    return monotonic()
