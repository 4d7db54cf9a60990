"""The pool: the models, the requests that use them, and the supervised engines.

`Policy` decides what is in memory; `MemoryScheduler` carries the decisions out.
"""

import asyncio
import json
import logging
import socket
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from mlx_server import limits
from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import ComputeAhead
from mlx_server.engine.supervisor import Supervisor
from mlx_server.errors import BadRequest, Overloaded, ServerError
from mlx_server.events import Event
from mlx_server.fair_queue import address_of
from mlx_server.models.adapter_catalog import AdapterLocation
from mlx_server.models.adapter_reader import AdapterSpec
from mlx_server.pool.adapters import LeasedAdapter, allowed_folder, catalog_of, find_adapter
from mlx_server.pool.engine_models import EngineModels, PoolEvents, PoolLimits
from mlx_server.pool.lease import Lease, MemoryDemand
from mlx_server.pool.memory import MemoryParts, size
from mlx_server.pool.models import DiskThreads, ModelView, OnProgress, ServedModels
from mlx_server.pool.prepare import Capabilities, ModelSpec, PreparedModel
from mlx_server.pool.readmission import Attempts
from mlx_server.pool.scheduler import now
from mlx_server.requests import GenerateRequest
from mlx_server.system.daily_bytes import DailyBytes
from mlx_server.system.servers import OtherServer, Servers

SHARE = 3
"""A client may hold at most this many times the slots that are left free. So a single client gets
three quarters of all slots, and a new client always finds some free. Network switches share their
buffers in this way, by dynamic thresholds."""

SHARE_OF_ADDRESS = 6
"""The same for all programs of one address together."""


class RowSlots:
    """Limits the answers that are being generated or waiting, in total and for each client.

    It refuses at once what is too much. Whose turn it is among the others, `FairQueue` says.
    """

    def __init__(self, most: int) -> None:
        """most: the slots that a client can take while no other client has any."""
        self.most = most
        self.total = most + -(-most // SHARE)
        self.taken = 0
        """The number of answers that are being generated or wait."""
        self.on_change: Callable[[int], None] = lambda taken: None
        """Called with `taken` whenever it has changed."""
        self._taken_by: Counter[str] = Counter()

    @contextmanager
    def take(self, rows: int, client: str = "") -> Iterator[None]:
        """Takes a slot for each answer until the block is left. It never waits: it raises
        BadRequest for more rows than any request may have, and Overloaded for a full queue."""
        if rows > self.most:
            raise BadRequest(self._too_many(rows))
        if not self._has_room(rows, client):
            raise Overloaded(self._full(self._taken_by[client]))
        with self.hold(rows, client):
            yield

    @contextmanager
    def hold(self, rows: int, client: str) -> Iterator[None]:
        """The same for answers that another server has let in."""
        self._count(rows, client)
        try:
            yield
        finally:
            self._count(-rows, client)

    def _too_many(self, rows: int) -> str:
        return (
            f"The request asks for {rows} answers; this server allows {self.most} in one request. "
            "Send fewer prompts, or a smaller `n`."
        )

    def _full(self, own: int) -> str:
        return (
            f"The queue is full: {self.taken} answers are being generated or waiting, {own} of "
            "them yours. Try again later."
        )

    def _count(self, rows: int, client: str) -> None:
        self.taken += rows
        self._taken_by[client] += rows
        self._taken_by += Counter()  # removes the clients whose count is zero
        self.on_change(self.taken)

    def _has_room(self, rows: int, client: str) -> bool:
        free, own = self.total - self.taken - rows, self._taken_by[client]
        address = address_of(client)
        others = sum(n for who, n in self._taken_by.items() if address_of(who) == address) - own
        return (
            free >= 0
            and (not own or own + rows <= SHARE * free)
            and (not others or others + own + rows <= SHARE_OF_ADDRESS * free)
        )


class PixelSlots(RowSlots):
    """Limits the bytes of the pictures in requests that are being answered or wait."""

    def __init__(self) -> None:
        super().__init__(limits.PIXEL_BYTES)

    def _too_many(self, rows: int) -> str:
        return f"The pictures have {size(rows)}; the limit is {size(self.most)}. Leave some out."

    def _full(self, own: int) -> str:
        return (
            f"The queue is full: the pictures of requests that are being answered or wait take "
            f"{size(self.taken)}, {size(own)} of them yours. Try again later."
        )


log = logging.getLogger("mlx_server.pool")


class AnswerRecorder(Protocol):
    def recorded(
        self, request: GenerateRequest, events: AsyncGenerator[Event]
    ) -> AsyncGenerator[Event]:
        """Yields the same events, and records each when the client takes it."""


@dataclass
class TrainingProgress:
    """How far the training of an adapter is that this server runs."""

    adapter: str
    steps: int
    step: int = 0
    loss: float | None = None
    is_paused: bool = False
    nbytes: int = 0
    """The memory of its process."""


class Pool:
    def __init__(
        self,
        specs: Iterable[ModelSpec],
        settings: PoolLimits | None = None,
        on_progress: OnProgress = lambda *progress: None,
        adapter_dirs: Sequence[Path] = (),
    ) -> None:
        """adapter_dirs: folders inside which a request may name any folder as its adapter."""
        self.models = ServedModels(specs)
        self._limits = settings or PoolLimits()
        self.row_slots = RowSlots(self._limits.concurrency + self._limits.queue)
        self.pixel_slots = PixelSlots()
        self._disk = DiskThreads(self.models.ids)
        self._adapter_dirs = adapter_dirs
        self.recorder: AnswerRecorder | None = None
        """Records every answer on its way to the client; None if answers are not recorded."""
        self.events = PoolEvents()
        self.servers: Servers | None = None
        """The servers with which it shares the machine's memory, if there may be any."""
        self._others: Mapping[str, OtherServer] = {}
        self.training: TrainingProgress | None = None
        self.make_engine: Callable[..., EngineClient] = EngineClient
        self.engines = [*self._engines_of(on_progress)]
        """The engines. The one with the models on this machine comes first, if there are any."""
        self._by_model = {id: engine for engine in self.engines for id in engine.entries}

    def _engines_of(self, on_progress: OnProgress) -> Iterator[EngineModels]:
        own_models = {e.spec.id: e for e in self.models.local if e.spec.group is None}
        groups = {e.spec.id: e.spec.group for e in self.models.local if e.spec.group}
        make = partial(
            EngineModels,
            limits=self._limits,
            disk=self._disk,
            on_progress=on_progress,
            make_engine=lambda **how: self.make_engine(**how),
            events=self.events,
            memory_changed=self._memory_changed,
            share_memory=self.share_memory,
        )
        memory = MemoryParts(len(groups), bool(own_models))
        if own_models or not groups:
            yield make(own_models, part=memory.own)
        for id, group in groups.items():
            yield make({id: self.models[id]}, part=memory.of_group, group=group)

    def engine_of(self, id: str) -> EngineModels:
        """The engine of this model, whether the model is loaded or not."""
        return self._by_model[id]

    @property
    def supervisor(self) -> Supervisor:
        return self.engines[0].supervisor

    @property
    def keeps_prompts(self) -> bool:
        """Whether the prompt cache is on."""
        return self._limits.prompt_cache != 0

    @property
    def disk_writes(self) -> DailyBytes | None:
        """What is written to the prompt cache's files in a day; None if there are none."""
        disk = self._limits.prompt_disk
        return disk.daily if disk.most_bytes else None

    @property
    def needs_engine(self) -> bool:
        """Whether there is an engine process; there is none if all models are upstream."""
        return bool(self.models.local) or not self.models.upstreams

    @property
    def healthy(self) -> bool:
        return all(each.supervisor.alive for each in self.engines) or not self.needs_engine

    @property
    def restarts(self) -> int:
        """The number of engine processes that were lost and replaced."""
        return sum(each.supervisor.restarts for each in self.engines)

    @property
    def resumed(self) -> int:
        """The number of requests that went on in another engine process."""
        return sum(each.readmission.resumed for each in self.engines)

    def kill(self) -> None:
        """Kills all engine processes, without waiting for their rows."""
        for each in self.engines:
            each.supervisor.kill()

    async def start(self) -> None:
        for model in self.models.upstreams:
            model.connection.learn_soon()
        if not self.needs_engine:
            return
        await self.share_memory()
        await asyncio.gather(*(each.start() for each in self.engines))

    async def share_memory(self) -> Collection[str]:
        """Tells the other servers what models and rows take here, and leaves them what theirs take.
        Returns their ids."""
        before = self._taken_by_others
        own_bytes = sum(each.taken for each in self.engines)
        with suppress(OSError):  # it is tried again
            if self.servers:
                self._others = await asyncio.to_thread(self.servers.exchange, own_bytes)
        leaving = filter(self.servers.is_leaving, self._others.values()) if self.servers else ()
        returning = sum(other.nbytes for other in leaving)
        for each in self.engines:
            each.leave(self._taken_by_others, returning)
        is_news = bool(before) != bool(self._taken_by_others)
        if is_news and self.supervisor.ready:  # before, `start` says it
            what = f"take {size(self._taken_by_others)}" if self._others else "have ended"
            budget = size(self.memory()["budget"])
            log.info("other servers of the data directory %s: the budget is %s", what, budget)
        return self._others.keys()

    @property
    def _taken_by_others(self) -> int:
        others = sum(other.nbytes for other in self._others.values())
        return others + (self.training.nbytes if self.training else 0)

    async def preloaded(self) -> None:
        """Returns when no model is being preloaded any more."""
        await asyncio.gather(*(each.scheduler.background.ended() for each in self.engines))

    def described(self) -> dict[str, str]:
        """What has to be the same in another server's engine for rows of a model to go on there."""
        specs = {spec.id: spec for spec in self.models.specs if spec.group is None}
        return {
            id: repr((spec.source, spec.kv_bits, spec.compute_dtype)) for id, spec in specs.items()
        }

    async def hand_over(self, successor: socket.socket) -> None:
        """Waits until the server that takes this one's place lacks memory, if it ever does, and has
        it compute the rows of this one unless it has other models."""
        loop, line = asyncio.get_running_loop(), b""
        successor.setblocking(False)
        while (received := await loop.sock_recv(successor, 1)) != b"\n":
            if not received:
                return
            line += received
        theirs, ours = json.loads(line), self.described()
        used = [view.spec.id for view in self.engines[0].views() if view.leases]
        if others := [id for id in used if theirs.get(id) != ours.get(id)]:
            names = ", ".join(others)
            log.warning("the new server waits for answers of models that it has not: %s", names)
            successor.close()
        elif used:
            self.engines[0].relay(successor)

    def retire(self) -> None:
        """Frees memory for the server that takes this one's place, as soon as answers end."""
        for each in self.engines:
            each.retire()

    async def stop(self, error: ServerError | None = None) -> None:
        """Ends the engines and connections. Waiting and later requests raise `error`, by default
        ShuttingDown."""
        await asyncio.gather(*(each.stop(error) for each in self.engines))
        await self._disk.stop()
        for model in self.models.upstreams:
            await model.connection.aclose()

    def views(self) -> list[ModelView]:
        """All models as they are now. An upstream that was silent for long is probed in a task."""
        for model in self.models.upstreams:
            model.connection.probe_soon()
        local = {view.spec.id: view for engine in self.engines for view in engine.views()}
        return [
            entry.upstream.view if entry.upstream else local[entry.spec.id] for entry in self.models
        ]

    def memory(self) -> dict[str, int]:
        """The memory budgets of all engines and the bytes counted against them, summed."""
        sums = Counter[str]()
        for each in self.engines:
            policy = each.policy
            sums["budget"] += policy.budget
            sums["used"] += policy.used
            sums["kv_reserved"] += policy.kv_reserved
            sums["prompt_cache"] += policy.cache
            sums["lowered"] += policy.lowered
        return {**sums, "other_servers": self._taken_by_others}

    async def prepared(self, name: str) -> PreparedModel:
        """Downloads and reads the model's files, once for all requests. Raises ServerError if they
        can't be used, and BadRequest for an upstream model."""
        entry = self.models.find(name)
        if entry.upstream:
            raise BadRequest(
                f"{entry.spec.id} is served by another server, so its tokens can't be counted or "
                "recorded here, and its adapters are not loaded here. Use a model that this server "
                "runs.",
                param="model",
            )
        return await self.engine_of(entry.spec.id).preparation.prepared(entry)

    async def adapter(self, prepared: PreparedModel, name: str) -> LeasedAdapter:
        """Finds an adapter by name or path, and reads its files if they have changed."""
        self._check_takes_adapters(prepared.id)
        look = partial(find_adapter, catalog_of(prepared), name, self._adapter_dirs)
        return await self._disk.run_in_turn(prepared.id, look)

    async def adapter_names(self, id: str) -> list[str]:
        """The names of the model's usable adapters on disk. It downloads nothing."""
        entry = self.models[id]
        if entry.upstream or entry.spec.group:
            return []
        return await self._disk.run_in_turn(id, entry.adapter_names)

    async def capabilities(self, id: str) -> Capabilities | None:
        """The model's capabilities; None if its files are not on disk. It downloads nothing."""
        entry = self.models[id]
        if entry.upstream:
            return entry.upstream.capabilities
        if entry.prepared:
            return entry.prepared.capabilities
        if entry.capabilities is None:
            await self._disk.run_in_turn(id, entry.look_for_capabilities)
        return entry.capabilities

    async def add_adapter(self, id: str, name: str, path: str) -> AdapterSpec:
        prepared = await self.prepared(id)
        self._check_takes_adapters(id)
        place = AdapterLocation(allowed_folder(path, self._adapter_dirs), by_client=True)
        return await self._disk.run_in_turn(id, partial(catalog_of(prepared).add, name, place))

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

    def visit(
        self,
        attempts: Attempts,
        prepared: PreparedModel,
        demand: MemoryDemand,
        adapter: LeasedAdapter | None = None,
    ) -> AbstractAsyncContextManager[Lease]:
        """Gives the request a lease that may be followed by another one, in another engine: see
        `Readmission.visit`."""
        lease = partial(self.lease, prepared, demand, adapter)
        return self.engine_of(prepared.id).readmission.visit(attempts, lease)

    def answered(self, attempts: Attempts) -> None:
        """Notes that a row of the request has had a token."""
        self.engine_of(attempts.model).readmission.answered(attempts)

    async def load(self, name: str, client: str = "") -> None:
        """Loads the model by taking a lease and releasing it. An upstream model is never loaded."""
        if self.models.upstream(name):
            return
        with self.row_slots.take(1, client):
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
        if self.models[id].upstream is None:
            engine = self.engine_of(id)
            engine.scheduler.do(engine.policy.keep(id, seconds, now()))

    def most_tokens(
        self, prepared: PreparedModel, rows: int, adapter: LeasedAdapter | None = None
    ) -> int:
        """The most tokens that each of `rows` rows can have if there are no other rows."""
        policy = self.engine_of(prepared.id).policy
        room = policy.room(prepared.id) - (adapter.spec.nbytes if adapter else 0)
        return prepared.kv.tokens_in(room // rows, prepared.context_length)

    def _memory_changed(self) -> None:
        self.events.memory(sum(each.policy.used for each in self.engines))
