"""The pool: the models in memory, the requests that use them, and the requests that wait.

`Policy` decides; the pool carries its decisions out through the supervised engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from mlx_server import limits
from mlx_server.engine.client import NO_DISK, EngineClient, PromptDisk
from mlx_server.engine.device_errors import Streak
from mlx_server.engine.messages import (
    DEFAULT_SCHEDULE,
    ComputeAhead,
    ComputedAhead,
    DeviceFailed,
    DiskCacheUse,
    Schedule,
    StepOutput,
)
from mlx_server.engine.supervisor import Supervisor
from mlx_server.errors import (
    EngineDied,
    ModelReplaced,
    ServerError,
    ShuttingDown,
    Unavailable,
)
from mlx_server.lora.catalog import AdapterSpec
from mlx_server.pool import actions
from mlx_server.pool.actions import ModelFacts
from mlx_server.pool.adapter_catalogs import AdapterCatalogs, catalog_of
from mlx_server.pool.adapters import AdapterPool, LeasedAdapter
from mlx_server.pool.background import BackgroundWork, cancelled
from mlx_server.pool.cache_limit import CacheLimit
from mlx_server.pool.concurrency import RowSlots
from mlx_server.pool.disk_threads import DiskThreads
from mlx_server.pool.entry import LoadedModel, ModelView, OnProgress, PoolEntry
from mlx_server.pool.lease import Lease, Leases, MemoryDemand, Waiter
from mlx_server.pool.memory_budget import budget_of, size
from mlx_server.pool.next_prompts import NextPrompts
from mlx_server.pool.policy import Policy
from mlx_server.pool.preparation import ModelPreparation
from mlx_server.pool.prepare import (
    REPLAY,
    Capabilities,
    ModelSpec,
    PreparedModel,
    capabilities_of,
    capabilities_on_disk,
)
from mlx_server.pool.refusals import refusal
from mlx_server.pool.served_models import ServedModels

log = logging.getLogger("mlx_server.pool")


@dataclass(frozen=True)
class PoolLimits:
    concurrency: int = 16
    """How many rows of one model are decoded in one batch."""
    queue: int = limits.QUEUE.value
    """How many answers of one client may wait for a place in a batch."""
    schedule: Schedule = DEFAULT_SCHEDULE
    wait_seconds: float = 300.0
    """How long a request waits for memory that other requests hold."""
    budget: int | None = None
    """Bytes for weights and caches; None: a default that suits the machine."""
    wired: str | int = "auto"
    """How many bytes of weights are wired on a Mac: see engine/wired_memory.py."""
    prompt_cache: int | None = None
    """Bytes of the prompt cache; None: all that models and answers leave."""
    prompt_disk: PromptDisk = NO_DISK


class Pool:
    def __init__(
        self,
        specs: Iterable[ModelSpec],
        settings: PoolLimits | None = None,
        on_progress: OnProgress = lambda *progress: None,
        adapter_dirs: Sequence[Path] = (),
    ) -> None:
        """adapter_dirs: a request may name a folder inside one of these as its adapter."""
        self._models = ServedModels(specs)
        self._limits = settings or PoolLimits()
        self.row_slots = RowSlots(self._limits.concurrency + self._limits.queue)
        self._tickets = count()
        self._waiting: dict[actions.Ticket, Waiter] = {}
        self._leases = Leases(lambda: self.engine, self._resize)
        self._timer: asyncio.TimerHandle | None = None
        self._background = BackgroundWork()
        self._next_prompts = NextPrompts(lambda: self.engine)
        self._disk = DiskThreads(self._models.ids)
        self._catalogs = AdapterCatalogs(self._disk, adapter_dirs)
        self._preparation = ModelPreparation(
            self._disk, lambda: self.engine, lambda: self._policy, self._check_open, on_progress
        )
        self.budget = budget_of(self._limits.budget, None)
        self._policy = self._policy_for()
        self._cache_limit = CacheLimit(lambda: self.engine)
        self.adapters = AdapterPool(lambda: self.engine, self._count_adapters)
        self._closed: ServerError | None = None
        self.on_rows: Callable[[int], None] = lambda rows: None
        """Called with `rows` whenever it may have changed."""
        self.on_step: Callable[[StepOutput], None] = lambda step: None
        self.on_ahead: Callable[[ComputedAhead], None] = lambda computed: None
        self.on_disk_cache: Callable[[DiskCacheUse], None] = lambda use: None
        self.on_ready: Callable[[str], None] = lambda id: None
        """Called with the id of each model that has been loaded."""
        self._out_of_memory = Streak()
        self.make_engine: Callable[..., EngineClient] = EngineClient
        self.supervisor = Supervisor(self._spawn, self._engine_lost, self._started)

    @property
    def engine(self) -> EngineClient:
        return self.supervisor.client

    @property
    def specs(self) -> list[ModelSpec]:
        return [entry.spec for entry in self._models]

    @property
    def loaded(self) -> list[LoadedModel]:
        return self._models.loaded

    def batching(self, id: str) -> bool | None:
        """Whether the model's answers share a batch; None until it has been loaded once."""
        return self._models[id].batching

    def context_length(self, id: str) -> int | None:
        """The model's context; None until its files have been read once, unless it is set."""
        entry = self._models[id]
        return entry.prepared.context_length if entry.prepared else entry.spec.context_length

    @property
    def keeps_prompts(self) -> bool:
        """Whether there is a prompt cache."""
        return self._limits.prompt_cache != 0

    async def start(self) -> None:
        ready = await self.supervisor.start()
        self._preparation.upcast = not ready.metal
        self.budget = budget_of(self._limits.budget, ready.recommended_bytes)
        log.info("memory budget: %s, %s", size(self.budget.nbytes), self.budget.source)
        if warning := self.budget.warning:
            log.warning(warning)
        self._policy = self._policy_for()
        self._started()

    async def stop(self, error: ServerError | None = None) -> None:
        """Ends the engine; requests that wait, and all later ones, get `error`."""
        self._closed = error or ShuttingDown("The server is shutting down.")
        if self._timer:
            self._timer.cancel()
        for waiter in self._waiting.values():
            waiter.refuse(copy(self._closed))
        await cancelled(e.preparing for e in self._models if e.preparing)
        await self.supervisor.stop(error)
        await self._disk.stop()
        await self._background.stop()
        await self._next_prompts.rendering.stop()

    def spec(self, name: str) -> ModelSpec:
        """Finds a model by its id or an alias. Raises ModelNotFound."""
        return self._models.find(name).spec

    def knows(self, name: str) -> bool:
        return name in self._models

    def views(self) -> list[ModelView]:
        now = time.time() - _now()
        views = self._policy.views()
        return [self._view(entry, views[entry.spec.id], now) for entry in self._models]

    def memory(self) -> dict[str, int]:
        """The budget and what is counted against it, in bytes."""
        return {
            "budget": self._policy.budget,
            "used": self._policy.used,
            "kv_reserved": self._policy.kv_reserved,
            "prompt_cache": self._policy.cache,
            "lowered": self._policy.lowered,
        }

    @property
    def rows(self) -> int:
        """How many answers are being generated or waiting."""
        return self.row_slots.taken

    @contextmanager
    def row_slot(self, rows: int, client: str = "") -> Iterator[None]:
        """Reserves slots for this many answers; raises BadRequest or Overloaded at once."""
        try:
            with self.row_slots.take(rows, client):
                self.on_rows(self.rows)
                yield
        finally:
            self.on_rows(self.rows)

    async def prepared(self, name: str) -> PreparedModel:
        """Fetches and reads the model's files, once for all requests."""
        return await self._preparation.prepared(self._models.find(name))

    def named(self, name: str) -> tuple[str, str | None]:
        """Splits `model:adapter`; a name that is itself a model's id or alias is not split."""
        return self._models.split(name)

    async def adapter(self, prepared: PreparedModel, name: str) -> LeasedAdapter:
        """Finds an adapter by name or path, and reads its files if they have changed."""
        return await self._catalogs.find(prepared, name)

    async def adapter_names(self, id: str) -> list[str]:
        """The names of the model's usable adapters on disk. Nothing is fetched for it."""
        return await self._catalogs.names(self._models[id])

    async def capabilities(self, id: str) -> Capabilities | None:
        """None while the model has not been fetched. Nothing is fetched for it."""
        entry = self._models[id]
        if entry.prepared:
            return capabilities_of(entry.prepared)
        if entry.capabilities is None:
            look = partial(capabilities_on_disk, entry.spec)
            entry.capabilities = await self._disk.run_in_turn(id, look)
        return entry.capabilities

    @property
    def replay_models(self) -> list[str]:
        return [spec.id for spec in self.specs if spec.source.startswith(REPLAY)]

    def reset_replay(self, id: str) -> None:
        """Makes a replay model begin its transcript again."""
        prepared = self._models[id].prepared
        if prepared and prepared.transcript:
            prepared.transcript.reset()

    async def add_adapter(self, id: str, name: str, path: str) -> AdapterSpec:
        return await self._catalogs.add(await self.prepared(id), name, path)

    async def remove_adapter(self, id: str, name: str) -> None:
        """Removes the adapter; returns when no row uses it any more and its memory is free."""
        catalog_of(await self.prepared(id)).remove(name)
        await self.adapters.drop(id, name)

    @asynccontextmanager
    async def lease(
        self, prepared: PreparedModel, demand: MemoryDemand, adapter: LeasedAdapter | None = None
    ) -> AsyncIterator[Lease]:
        """Keeps model and adapter loaded, with memory for the rows, until the block is left."""
        self._check_open()
        _ = self.engine  # raises while there is no engine, instead of queueing a load for none
        ticket = next(self._tickets)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(self._models[prepared.id], demand, granted)
        self._waiting[ticket] = waiter
        try:
            self._do(
                self._policy.request(
                    ticket,
                    prepared.id,
                    demand.nbytes(demand.soon),
                    _now(),
                    most_kv_bytes=demand.nbytes(demand.most_tokens),
                    rows=demand.rows,
                    extra_bytes=adapter.spec.nbytes if adapter else 0,
                    client=demand.client,
                )
            )
            await waiter.granted
            lease = self._leases[ticket]
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
            self._waiting.pop(ticket, None)
            self._do(self._policy.cancel(ticket, _now()))
            self._do(self._policy.release(ticket, _now()))
            self._leases.remove(ticket)

    async def load(self, name: str, client: str = "") -> None:
        """Loads the model, as a request does that has no prompt."""
        with self.row_slot(1, client):
            prepared = await self.prepared(name)
            demand = MemoryDemand(prepared.kv, 1, 1, client=client)
            async with self.lease(prepared, demand):
                pass

    def compute_ahead(self, prepared: PreparedModel, render: Callable[[], ComputeAhead]) -> None:
        """Has the engine compute the beginning of a next prompt while it is idle, after `render`,
        which runs in a thread."""
        if self.keeps_prompts:
            self._next_prompts.begin(prepared.id, render)

    def keep(self, id: str, seconds: float) -> None:
        """Sets how long a model that is in memory stays there without a request."""
        self._do(self._policy.keep(id, seconds, _now()))

    def most_tokens(
        self, prepared: PreparedModel, rows: int, adapter: LeasedAdapter | None = None
    ) -> int:
        """The tokens that each of `rows` rows can hold at its end if there are no other rows."""
        room = self._policy.room(prepared.id) - (adapter.spec.nbytes if adapter else 0)
        return prepared.kv.tokens_in(room // rows, prepared.context_length)

    def _resize(self, ticket: actions.Ticket, kv_bytes: int) -> None:
        self._do(self._policy.resize(ticket, kv_bytes, _now()))

    def _check_open(self) -> None:
        if self._closed:
            raise copy(self._closed)

    def _policy_for(self) -> Policy:
        return Policy(
            {e.spec.id: ModelFacts(0, e.spec.pinned, e.spec.ttl) for e in self._models},
            budget=self.budget.nbytes,
            wait_seconds=self._limits.wait_seconds,
        )

    def _spawn(self) -> EngineClient:
        most = self._limits.prompt_cache
        client = self.make_engine(
            concurrency=self._limits.concurrency,
            cache_bytes=self.budget.nbytes if most is None else most,
            wired=self._limits.wired,
            schedule=self._limits.schedule,
            disk=self._limits.prompt_disk,
        )
        client.on_disk_cache = lambda use: self.on_disk_cache(use)
        client.on_step = self._stepped
        client.on_ahead = self.on_ahead
        client.on_prefill = self._leases.prefilled
        client.on_device_failed = self._device_failed
        return client

    def _device_failed(self, failure: DeviceFailed) -> None:
        if failure.kind != "out_of_memory" or self._out_of_memory.failed(_now()) < 2:
            return
        before = self._policy.budget
        self._do(self._policy.lower(_now()))
        log.warning(
            "memory ran out %d times in a row: the budget is %s instead of %s until the next "
            "start. Close other programs, or lower `memory_budget` under `server` in models.yaml.",
            self._out_of_memory.length,
            size(self._policy.budget),
            size(before),
        )
        with suppress(EngineDied):
            self.engine.limit_memory(self._policy.budget)

    def _stepped(self, step: StepOutput) -> None:
        if any(token.finish for token in step.tokens):
            self._out_of_memory.answered()
        self._leases.count_tokens(step.tokens)
        self._cache_limit.reported(step.cache_bytes)
        self._count_idle()
        self.on_step(step)

    def _count_adapters(self) -> None:
        for model in self.loaded:
            id = model.prepared.id
            self._do(self._policy.set_extra_bytes(id, self.adapters.unreserved_bytes(id), _now()))
        self._count_idle()

    def _count_idle(self) -> None:
        """Reports the bytes that can be freed as soon as a request needs them."""
        self._do(self._policy.cache_bytes(self._cache_limit.nbytes + self.adapters.idle_bytes))

    def _engine_lost(self) -> None:
        self._background.cancel()  # a load may have ended, and not have reported its result yet
        for entry in self._models:
            entry.model = entry.progress = None
        self._cache_limit.engine_lost()
        self.adapters.forget()
        for ticket, waiter in self._waiting.items():
            self._policy.cancel(ticket, _now())
            waiter.refuse(EngineDied("The engine process was lost. Send the request again."))
        self._do(self._policy.engine_lost(_now()))

    def _started(self) -> None:
        with suppress(EngineDied):
            self.engine.limit_memory(self.budget.mlx_limit)
        self._limit_cache()
        self._preload()

    def _preload(self) -> None:
        for entry in self._models:
            if entry.spec.preload:
                self._background.begin(self._preload_one(entry))

    async def _preload_one(self, entry: PoolEntry) -> None:
        with suppress(ServerError):  # it has been logged
            await self.prepared(entry.spec.id)
            self._do(self._policy.preload(entry.spec.id, _now()))

    def _do(self, wanted: actions.Actions) -> None:
        if self._closed:
            return
        for action in wanted:
            match action:
                case actions.LoadAction(model):
                    self._background.begin(self._load(self._models[model]))
                case actions.UnloadAction(model):
                    self._background.begin(self._unload(self._models[model]))
                case actions.ShrinkCache(to_bytes):
                    self._shrink(to_bytes)
                case actions.Grant(ticket):
                    self._grant(ticket)
                case actions.PreemptAction(ticket):
                    self._limit_cache()  # the cache keeps what the rows give back, if it has room
                    self._leases.preempt(ticket)
                case actions.ResumeAction(ticket):
                    self._limit_cache()
                    self._leases.resume(ticket)
                case actions.Refuse(ticket, reason):
                    waiter = self._waiting.pop(ticket)
                    waiter.refuse(refusal(reason, waiter.entry, self._policy))
        self._limit_cache()
        self._set_timer()

    def _grant(self, ticket: actions.Ticket) -> None:
        waiter = self._waiting.pop(ticket)
        assert waiter.entry.model is not None
        self._leases.add(waiter.entry.model, waiter.demand, ticket)
        waiter.grant()

    def _shrink(self, to_bytes: int) -> None:
        """Shrinks idle adapters and the prompt cache to `to_bytes` together."""
        self.adapters.shrink(to_bytes)
        self._cache_limit.shrunk(max(0, to_bytes - self.adapters.idle_bytes))

    def _limit_cache(self) -> None:
        """Sends the engine the prompt cache's limit, before any request is given the memory."""
        others = self._policy.used - self._policy.cache + self.adapters.idle_bytes
        self._cache_limit.send(max(0, self._policy.budget - others))

    async def _load(self, entry: PoolEntry) -> None:
        prepared = entry.prepared
        assert prepared is not None
        report = self._preparation.reporter(entry)
        entry.failure = None
        try:
            loaded = await self._preparation.load(prepared, report)
        except ModelReplaced as error:
            self._preparation.failed(entry, error)
            self._do(self._policy.load_failed(prepared.id, _now()))
            return
        except Unavailable:
            return  # the engine is gone: `_engine_lost` cleans up, or the server is stopping
        except Exception as error:
            self._preparation.failed(entry, error)
            self._do(self._policy.load_failed(prepared.id, _now()))
            return
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
        self._do(self._policy.loaded(prepared.id, loaded.nbytes, _now()))
        self.on_ready(prepared.id)

    async def _unload(self, entry: PoolEntry) -> None:
        entry.model = None
        self.adapters.forget(entry.spec.id)
        with suppress(Unavailable):
            await self.engine.unload(entry.spec.id)
            log.info("%s was unloaded", entry.spec.id)
            self._do(self._policy.unloaded(entry.spec.id, _now()))

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        at = self._policy.next_deadline()
        loop = asyncio.get_running_loop()
        self._timer = None if at is None else loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._do(self._policy.tick(_now()))

    def _view(self, entry: PoolEntry, view: actions.PolicyView, offset: float) -> ModelView:
        prepared = entry.prepared
        return ModelView(
            spec=entry.spec,
            family=prepared.family.name if prepared else None,
            state="preparing" if entry.preparing and not prepared else view.state,
            leases=view.leases,
            nbytes=view.nbytes,
            last_used=None if view.last_used is None else view.last_used + offset,
            stale_at=None if view.stale_at is None else view.stale_at + offset,
            progress=entry.progress,
            error=entry.failure.message if entry.failure else None,
            adapters=self.adapters.of(entry.spec.id),
            batching=entry.batching,
            prefilling=self._leases.prefilling(entry.spec.id),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
