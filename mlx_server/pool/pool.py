"""The pool: the models, the requests that use them, and the supervised engines.

`Policy` decides what is in memory; `MemoryScheduler` carries the decisions out.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import (
    ComputeAhead,
    ComputedAhead,
    DiskCacheUse,
    StepOutput,
)
from mlx_server.engine.supervisor import Supervisor
from mlx_server.errors import (
    BadRequest,
    Overloaded,
    ServerError,
)
from mlx_server.events import Event
from mlx_server.fair_queue import address_of
from mlx_server.families.base import ModelFamily
from mlx_server.lora.catalog import AdapterSpec
from mlx_server.pool.adapters import AdapterCatalogs, LeasedAdapter, catalog_of
from mlx_server.pool.engine_models import EngineEvents, EngineModels, PoolLimits
from mlx_server.pool.lease import Lease, MemoryDemand
from mlx_server.pool.memory import MemoryParts
from mlx_server.pool.models import (
    DiskThreads,
    LoadedModel,
    ModelView,
    OnProgress,
    PoolEntry,
    ServedModels,
    UpstreamModel,
)
from mlx_server.pool.policy import PolicyView
from mlx_server.pool.prepare import (
    REPLAY,
    Capabilities,
    ModelSpec,
    PreparedModel,
    capabilities_of,
)
from mlx_server.pool.scheduler import now
from mlx_server.requests import GenerateRequest

SHARE = 3
"""A client may hold at most this many times the slots that are left free. So a single client gets
three quarters of all slots, and a new client always finds some free. Network switches share their
buffers in this way, by dynamic thresholds."""

SHARE_OF_ADDRESS = 6
"""The same for all programs of one address together."""


class RowSlots:
    """Limits the answers that are being generated or waiting, in total and for each client."""

    def __init__(self, most: int) -> None:
        """most: the slots that a client can take while no other client has any."""
        self.most = most
        self.total = most + -(-most // SHARE)
        self.taken = 0
        self._taken_by: Counter[str] = Counter()

    @contextmanager
    def take(self, rows: int, client: str) -> Iterator[None]:
        """Takes a slot for each answer until the block is left. It never waits: it raises
        BadRequest for more rows than any request may have, and Overloaded for a full queue."""
        if rows > self.most:
            raise BadRequest(
                f"The request asks for {rows} answers; this server allows {self.most} in one "
                "request. Send fewer prompts, or a smaller `n`."
            )
        if not self._has_room(rows, client):
            raise Overloaded(
                f"The queue is full: {self.taken} answers are being generated or waiting, "
                f"{self._taken_by[client]} of them yours. Try again later."
            )
        self.taken += rows
        self._taken_by[client] += rows
        try:
            yield
        finally:
            self.taken -= rows
            self._taken_by[client] -= rows
            self._taken_by += Counter()  # removes the clients whose count is zero

    def _has_room(self, rows: int, client: str) -> bool:
        free, own = self.total - self.taken - rows, self._taken_by[client]
        address = address_of(client)
        others = sum(n for who, n in self._taken_by.items() if address_of(who) == address) - own
        return (
            free >= 0
            and (not own or own + rows <= SHARE * free)
            and (not others or others + own + rows <= SHARE_OF_ADDRESS * free)
        )


log = logging.getLogger("mlx_server.pool")


class AnswerRecorder(Protocol):
    def recorded(
        self, request: GenerateRequest, events: AsyncGenerator[Event]
    ) -> AsyncGenerator[Event]:
        """Yields the same events, and records each when the client takes it."""


class Pool:
    def __init__(
        self,
        specs: Iterable[ModelSpec],
        settings: PoolLimits | None = None,
        on_progress: OnProgress = lambda *progress: None,
        adapter_dirs: Sequence[Path] = (),
    ) -> None:
        """adapter_dirs: folders inside which a request may name any folder as its adapter."""
        self._models = ServedModels(specs)
        self._limits = settings or PoolLimits()
        self.row_slots = RowSlots(self._limits.concurrency + self._limits.queue)
        self._disk = DiskThreads(self._models.ids)
        self._catalogs = AdapterCatalogs(self._disk, adapter_dirs)
        self.recorder: AnswerRecorder | None = None
        """Records every answer on its way to the client; None if answers are not recorded."""
        self.on_rows: Callable[[int], None] = lambda rows: None
        """Called with the property `rows` whenever it may have changed."""
        self.on_step: Callable[[StepOutput], None] = lambda step: None
        self.on_ahead: Callable[[ComputedAhead], None] = lambda computed: None
        self.on_disk_cache: Callable[[DiskCacheUse], None] = lambda use: None
        self.on_ready: Callable[[PreparedModel], None] = lambda model: None
        """Called with each model that has been loaded."""
        self.on_memory: Callable[[int], None] = lambda nbytes: None
        """Called with the bytes in use whenever they may have changed."""
        self.make_engine: Callable[..., EngineClient] = EngineClient
        self.engines = [*self._engines_of(on_progress)]
        """The engines. The one with the models on this machine comes first, if there are any."""
        self._by_model = {id: engine for engine in self.engines for id in engine.entries}

    def _engines_of(self, on_progress: OnProgress) -> Iterator[EngineModels]:
        own = {e.spec.id: e for e in self._models.local if e.spec.group is None}
        groups = {e.spec.id: e.spec.group for e in self._models.local if e.spec.group}
        make = partial(
            EngineModels,
            limits=self._limits,
            disk=self._disk,
            on_progress=on_progress,
            make_engine=lambda **how: self.make_engine(**how),
            events=EngineEvents(
                self._stepped,
                lambda model: self.on_ready(model),
                self._memory_changed,
                self._attach,
            ),
        )
        memory = MemoryParts([group.memory for group in groups.values()], bool(own))
        if own or not groups:
            yield make(own, part=memory.own)
        for id, group in groups.items():
            part = partial(memory.of_group, group.memory)
            yield make({id: self._models[id]}, part=part, group=group)

    def engine_of(self, id: str) -> EngineModels:
        """The engine of this model, whether the model is loaded or not."""
        return self._by_model[id]

    @property
    def supervisor(self) -> Supervisor:
        return self.engines[0].supervisor

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
        """The model's context length in tokens. If models.yaml does not set it, it is None until
        the model's files have been read."""
        entry = self._models[id]
        return entry.prepared.context_length if entry.prepared else entry.spec.context_length

    @property
    def keeps_prompts(self) -> bool:
        """Whether the prompt cache is on."""
        return self._limits.prompt_cache != 0

    @property
    def needs_engine(self) -> bool:
        """Whether there is an engine process; there is none if all models are upstream."""
        return bool(self._models.local) or not self._models.upstreams

    @property
    def healthy(self) -> bool:
        return all(each.supervisor.alive for each in self.engines) or not self.needs_engine

    def kill(self) -> None:
        """Kills all engine processes, without waiting for their rows."""
        for each in self.engines:
            each.supervisor.kill()

    def upstream(self, name: str) -> UpstreamModel | None:
        """The upstream model with this id or alias, which an adapter's name may follow; None for
        any other name."""
        base = self.named(name)[0]
        return self._models.find(base).upstream if self.knows(base) else None

    async def start(self) -> None:
        for model in self._models.upstreams:
            model.connection.learn_soon()
        if not self.needs_engine:
            return
        await asyncio.gather(*(each.start() for each in self.engines))

    async def stop(self, error: ServerError | None = None) -> None:
        """Ends the engines and connections. Waiting and later requests raise `error`, by default
        ShuttingDown."""
        await asyncio.gather(*(each.stop(error) for each in self.engines))
        await self._disk.stop()
        for model in self._models.upstreams:
            await model.connection.aclose()

    def spec(self, name: str) -> ModelSpec:
        """Finds a model by its id or an alias. Raises ModelNotFound."""
        return self._models.find(name).spec

    def add_alias(self, alias: str, id: str) -> None:
        """Makes `alias` another name of the model. Raises BadRequest if models.yaml gives that name
        to another model."""
        self._models.add_alias(alias, id)

    def knows(self, name: str) -> bool:
        return name in self._models

    def views(self) -> list[ModelView]:
        offset = time.time() - now()
        views = {id: view for each in self.engines for id, view in each.policy.views().items()}
        return [
            _upstream_view(entry.upstream)
            if entry.upstream
            else self._view(entry, views[entry.spec.id], offset)
            for entry in self._models
        ]

    def memory(self) -> dict[str, int]:
        """The memory budgets of all engines and the bytes counted against them, summed."""
        found = Counter[str]()
        for each in self.engines:
            policy = each.policy
            found["budget"] += policy.budget
            found["used"] += policy.used
            found["kv_reserved"] += policy.kv_reserved
            found["prompt_cache"] += policy.cache
            found["lowered"] += policy.lowered
        return dict(found)

    @property
    def rows(self) -> int:
        """The number of answers that are being generated or wait."""
        return self.row_slots.taken

    @contextmanager
    def row_slot(self, rows: int, client: str = "") -> Iterator[None]:
        """Takes a slot for each answer until the block is left. Raises BadRequest or Overloaded at
        once if there are not enough: see `RowSlots.take`."""
        try:
            with self.row_slots.take(rows, client):
                self.on_rows(self.rows)
                yield
        finally:
            self.on_rows(self.rows)

    async def prepared(self, name: str) -> PreparedModel:
        """Downloads and reads the model's files, once for all requests. Raises ServerError if they
        can't be used, and BadRequest for an upstream model."""
        entry = self._models.find(name)
        if entry.upstream:
            raise BadRequest(
                f"{entry.spec.id} is served by another server, so its tokens can't be counted or "
                "recorded here, and its adapters are not loaded here. Use a model that this server "
                "runs.",
                param="model",
            )
        return await self.engine_of(entry.spec.id).preparation.prepared(entry)

    async def family(self, name: str) -> ModelFamily:
        """The family of the model with this id or alias, whose files are read if necessary."""
        entry = self._models.find(name)
        return entry.upstream.family if entry.upstream else (await self.prepared(name)).family

    def named(self, name: str) -> tuple[str, str | None]:
        """Splits `model:adapter`; a name that is itself a model's id or alias is not split."""
        return self._models.split(name)

    async def adapter(self, prepared: PreparedModel, name: str) -> LeasedAdapter:
        """Finds an adapter by name or path, and reads its files if they have changed."""
        self._check_takes_adapters(prepared.id)
        return await self._catalogs.find(prepared, name)

    async def adapter_names(self, id: str) -> list[str]:
        """The names of the model's usable adapters on disk. It downloads nothing."""
        entry = self._models[id]
        return [] if entry.upstream or entry.spec.group else await self._catalogs.names(entry)

    async def capabilities(self, id: str) -> Capabilities | None:
        """The model's capabilities; None if its files are not on disk. It downloads nothing."""
        entry = self._models[id]
        if entry.upstream:
            return entry.upstream.capabilities
        if entry.prepared:
            return capabilities_of(entry.prepared)
        if entry.capabilities is None:
            await self._disk.run_in_turn(id, entry.look_for_capabilities)
        return entry.capabilities

    @property
    def replay_models(self) -> list[str]:
        return [spec.id for spec in self.specs if spec.source.startswith(REPLAY)]

    def reset_replay(self, id: str) -> None:
        """Makes a replay model start its transcript from the beginning."""
        prepared = self._models[id].prepared
        if prepared and prepared.transcript:
            prepared.transcript.reset()

    async def add_adapter(self, id: str, name: str, path: str) -> AdapterSpec:
        prepared = await self.prepared(id)
        self._check_takes_adapters(id)
        return await self._catalogs.add(prepared, name, path)

    def _check_takes_adapters(self, id: str) -> None:
        if group := self.engine_of(id).group:
            raise BadRequest(
                f"{id} is split over {len(group.hosts)} ranks, and adapters are not split yet. "
                "Send the request without an adapter, or to a model on one machine.",
                param="adapter",
            )

    async def remove_adapter(self, id: str, name: str) -> None:
        """Removes the adapter that a client added. Returns when no row uses it any more."""
        catalog_of(await self.prepared(id)).remove(name)
        await self.engine_of(id).scheduler.adapters.drop(id, name)

    def lease(
        self, prepared: PreparedModel, demand: MemoryDemand, adapter: LeasedAdapter | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Keeps the model and the adapter loaded, with memory for the rows, until the block is
        left. It waits for the memory, and loads what is not loaded."""
        return self.engine_of(prepared.id).scheduler.lease(prepared, demand, adapter)

    async def load(self, name: str, client: str = "") -> None:
        """Loads the model by taking a lease and releasing it. An upstream model is never loaded."""
        if self.upstream(name):
            return
        with self.row_slot(1, client):
            prepared = await self.prepared(name)
            demand = MemoryDemand(prepared.kv, 1, 1, client=client)
            async with self.lease(prepared, demand):
                pass

    def compute_ahead(self, prepared: PreparedModel, render: Callable[[], ComputeAhead]) -> None:
        """Lets the idle engine compute the beginning of a next prompt, which `render` renders in a
        thread. Does nothing without a prompt cache."""
        if self.keeps_prompts:
            self.engine_of(prepared.id).next_prompts.begin(prepared.id, render)

    def keep(self, id: str, seconds: float) -> None:
        """Sets the seconds that a model in memory stays there without a request."""
        if self._models[id].upstream is None:
            engine = self.engine_of(id)
            engine.scheduler.do(engine.policy.keep(id, seconds, now()))

    def most_tokens(
        self, prepared: PreparedModel, rows: int, adapter: LeasedAdapter | None = None
    ) -> int:
        """The most tokens that each of `rows` rows can have if there are no other rows."""
        policy = self.engine_of(prepared.id).policy
        room = policy.room(prepared.id) - (adapter.spec.nbytes if adapter else 0)
        return prepared.kv.tokens_in(room // rows, prepared.context_length)

    def _attach(self, client: EngineClient) -> None:
        client.on_disk_cache = lambda use: self.on_disk_cache(use)
        client.on_ahead = self.on_ahead

    def _stepped(self, step: StepOutput) -> None:
        self.on_step(step)

    def _memory_changed(self) -> None:
        self.on_memory(sum(each.policy.used for each in self.engines))

    def _view(self, entry: PoolEntry, view: PolicyView, offset: float) -> ModelView:
        prepared, scheduler = entry.prepared, self.engine_of(entry.spec.id).scheduler
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
            adapters=scheduler.adapters.loaded_for(entry.spec.id),
            batching=entry.batching,
            prefilling=scheduler.leases.prefilling(entry.spec.id),
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
