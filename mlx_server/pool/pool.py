"""The pool: the models, the requests that use them, and the supervised engine.

`Policy` decides what is in memory; `MemoryScheduler` carries its decisions out.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlx_server import limits
from mlx_server.engine.client import NO_DISK, EngineClient, PromptDisk
from mlx_server.engine.messages import (
    DEFAULT_SCHEDULE,
    ComputeAhead,
    ComputedAhead,
    DiskCacheUse,
    Schedule,
    StepOutput,
)
from mlx_server.engine.supervisor import Supervisor
from mlx_server.errors import (
    BadRequest,
    EngineDied,
    ServerError,
    ShuttingDown,
)
from mlx_server.families.base import ModelFamily
from mlx_server.lora.catalog import AdapterSpec
from mlx_server.pool import actions
from mlx_server.pool.actions import ModelFacts
from mlx_server.pool.adapter_catalogs import AdapterCatalogs, catalog_of
from mlx_server.pool.adapters import AdapterPool, LeasedAdapter
from mlx_server.pool.background import cancelled
from mlx_server.pool.concurrency import RowSlots
from mlx_server.pool.disk_threads import DiskThreads
from mlx_server.pool.entry import LoadedModel, ModelView, OnProgress, PoolEntry
from mlx_server.pool.lease import Lease, MemoryDemand
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
from mlx_server.pool.scheduler import MemoryScheduler, now
from mlx_server.pool.served_models import ServedModels
from mlx_server.pool.upstreams import UpstreamModel

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
        self._next_prompts = NextPrompts(lambda: self.engine)
        self._disk = DiskThreads(self._models.ids)
        self._catalogs = AdapterCatalogs(self._disk, adapter_dirs)
        self._preparation = ModelPreparation(
            self._disk,
            lambda: self.engine,
            lambda: self._policy,
            lambda: self._scheduler.check_open(),
            on_progress,
        )
        self.budget = budget_of(self._limits.budget, None)
        self._scheduler = MemoryScheduler(
            self._models,
            self._preparation,
            self._policy_for(),
            lambda: self.engine,
            lambda id: self.on_ready(id),
            lambda nbytes: self.on_memory(nbytes),
        )
        self.on_rows: Callable[[int], None] = lambda rows: None
        """Called with `rows` whenever it may have changed."""
        self.on_step: Callable[[StepOutput], None] = lambda step: None
        self.on_ahead: Callable[[ComputedAhead], None] = lambda computed: None
        self.on_disk_cache: Callable[[DiskCacheUse], None] = lambda use: None
        self.on_ready: Callable[[str], None] = lambda id: None
        """Called with the id of each model that has been loaded."""
        self.on_memory: Callable[[int], None] = lambda nbytes: None
        """Called with the bytes in use whenever they may have changed."""
        self.make_engine: Callable[..., EngineClient] = EngineClient
        self.supervisor = Supervisor(self._spawn, self._scheduler.engine_lost, self._started)

    @property
    def engine(self) -> EngineClient:
        return self.supervisor.client

    @property
    def adapters(self) -> AdapterPool:
        return self._scheduler.adapters

    @property
    def _policy(self) -> Policy:
        return self._scheduler.policy

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

    @property
    def needs_engine(self) -> bool:
        """Whether this server runs models itself; else there is no engine process."""
        return bool(self._models.local) or not self._models.upstreams

    @property
    def healthy(self) -> bool:
        return self.supervisor.alive or not self.needs_engine

    def upstream(self, name: str) -> UpstreamModel | None:
        """The model that another server has, by id or alias; None for any other name."""
        base = self.named(name)[0]
        return self._models.find(base).upstream if self.knows(base) else None

    async def start(self) -> None:
        if not self.needs_engine:
            return
        ready = await self.supervisor.start()
        self._preparation.upcast = not ready.metal
        self.budget = budget_of(self._limits.budget, ready.recommended_bytes)
        log.info("memory budget: %s, %s", size(self.budget.nbytes), self.budget.source)
        if warning := self.budget.warning:
            log.warning(warning)
        self._scheduler.policy = self._policy_for()
        self._started()

    async def stop(self, error: ServerError | None = None) -> None:
        """Ends the engine; requests that wait, and all later ones, get `error`."""
        self._scheduler.close(error or ShuttingDown("The server is shutting down."))
        await cancelled(e.preparing for e in self._models if e.preparing)
        await self.supervisor.stop(error)
        await self._disk.stop()
        await self._scheduler.background.stop()
        await self._next_prompts.rendering.stop()
        for model in self._models.upstreams:
            await model.connection.aclose()

    def spec(self, name: str) -> ModelSpec:
        """Finds a model by its id or an alias. Raises ModelNotFound."""
        return self._models.find(name).spec

    def add_alias(self, alias: str, id: str) -> None:
        """Raises BadRequest if it is the name of another model."""
        self._models.add_alias(alias, id)

    def knows(self, name: str) -> bool:
        return name in self._models

    def views(self) -> list[ModelView]:
        offset = time.time() - now()
        views = self._policy.views()
        return [
            _upstream_view(entry.upstream)
            if entry.upstream
            else self._view(entry, views[entry.spec.id], offset)
            for entry in self._models
        ]

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
        entry = self._models.find(name)
        if entry.upstream:
            raise BadRequest(
                f"{entry.spec.id} is served by another server, whose tokens can't be counted or "
                "recorded here. Use a model that this server runs.",
                param="model",
            )
        return await self._preparation.prepared(entry)

    async def family(self, name: str) -> ModelFamily:
        """The family of the model with this id or alias."""
        entry = self._models.find(name)
        return entry.upstream.family if entry.upstream else (await self.prepared(name)).family

    def named(self, name: str) -> tuple[str, str | None]:
        """Splits `model:adapter`; a name that is itself a model's id or alias is not split."""
        return self._models.split(name)

    async def adapter(self, prepared: PreparedModel, name: str) -> LeasedAdapter:
        """Finds an adapter by name or path, and reads its files if they have changed."""
        return await self._catalogs.find(prepared, name)

    async def adapter_names(self, id: str) -> list[str]:
        """The names of the model's usable adapters on disk. Nothing is fetched for it."""
        entry = self._models[id]
        return [] if entry.upstream else await self._catalogs.names(entry)

    async def capabilities(self, id: str) -> Capabilities | None:
        """None while the model has not been fetched. Nothing is fetched for it."""
        entry = self._models[id]
        if entry.upstream:
            return entry.upstream.capabilities
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

    def lease(
        self, prepared: PreparedModel, demand: MemoryDemand, adapter: LeasedAdapter | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Keeps model and adapter loaded, with memory for the rows, until the block is left."""
        return self._scheduler.lease(prepared, demand, adapter)

    async def load(self, name: str, client: str = "") -> None:
        """Loads the model, as a request does that has no prompt. An upstream's needs no loading."""
        if self.upstream(name):
            return
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
        if self._models[id].upstream is None:
            self._scheduler.do(self._policy.keep(id, seconds, now()))

    def most_tokens(
        self, prepared: PreparedModel, rows: int, adapter: LeasedAdapter | None = None
    ) -> int:
        """The tokens that each of `rows` rows can hold at its end if there are no other rows."""
        room = self._policy.room(prepared.id) - (adapter.spec.nbytes if adapter else 0)
        return prepared.kv.tokens_in(room // rows, prepared.context_length)

    def _policy_for(self) -> Policy:
        return Policy(
            {e.spec.id: ModelFacts(0, e.spec.pinned, e.spec.ttl) for e in self._models.local},
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
        client.on_prefill = self._scheduler.leases.prefilled
        client.on_device_failed = self._scheduler.device_failed
        return client

    def _stepped(self, step: StepOutput) -> None:
        self._scheduler.stepped(step)
        self.on_step(step)

    def _started(self) -> None:
        with suppress(EngineDied):
            self.engine.limit_memory(self.budget.mlx_limit)
        self._scheduler.limit_cache()
        self._preload()

    def _preload(self) -> None:
        for entry in self._models.local:
            if entry.spec.preload:
                self._scheduler.background.begin(self._preload_one(entry))

    async def _preload_one(self, entry: PoolEntry) -> None:
        with suppress(ServerError):  # it has been logged
            await self.prepared(entry.spec.id)
            self._scheduler.do(self._policy.preload(entry.spec.id, now()))

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
            prefilling=self._scheduler.leases.prefilling(entry.spec.id),
        )


def _upstream_view(model: UpstreamModel) -> ModelView:
    connection = model.connection
    return ModelView(
        spec=model.spec,
        family=model.capabilities.family,
        state="unavailable" if connection.breaker.is_open else "ready",
        leases=connection.running,
        nbytes=0,
        last_used=connection.last_used,
        stale_at=None,
        progress=None,
        error=connection.last_error,
        adapters=[],
    )
