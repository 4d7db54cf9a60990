"""One engine process and its models: their memory, their leases, loads and restarts.

The models on this machine share one engine. A model over several machines has an engine of its own,
whose process is rank 0 of the group, so that it does not slow down other models.
"""

import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_server import limits
from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import (
    ComputeAhead,
    ComputedAhead,
    DeviceFailed,
    DiskCacheUse,
    LimitMemory,
    StepOutput,
)
from mlx_server.engine.supervisor import Supervisor
from mlx_server.engine.worker_arguments import NO_DISK, PromptDisk, RankGroup, WorkerArguments
from mlx_server.errors import EngineDied, Overloaded, ServerError, ShuttingDown
from mlx_server.pool.memory import MemoryBudget, memory_budget, size
from mlx_server.pool.models import DiskThreads, ModelPreparation, ModelView, OnProgress, PoolEntry
from mlx_server.pool.policy import Policy
from mlx_server.pool.prepare import PreparedModel
from mlx_server.pool.readmission import Readmission
from mlx_server.pool.reservations import ModelFacts
from mlx_server.pool.scheduler import BackgroundWork, MemoryScheduler, cancelled, now
from mlx_server.request_threads import in_thread

log = logging.getLogger("mlx_server.pool")


@dataclass(frozen=True)
class PoolLimits:
    """The settings for all models together."""

    concurrency: int = limits.CONCURRENCY
    """The most rows of one model that are decoded in one batch."""
    queue: int = limits.QUEUE
    """The most answers of one client that may wait for a place in a batch."""
    wait_seconds: float = float(limits.WAIT_SECONDS)
    """How long a request waits for memory before it is refused."""
    tier_wait: float = float(limits.TIER_WAIT_SECONDS)
    """How long lower tiers wait at most."""
    budget: int | None = None
    """The bytes for weights and caches; None: `memory_budget` takes a default for this machine."""
    prompt_cache: int | None = None
    """The most bytes of the prompt cache; None: all that models and rows leave."""
    prompt_disk: PromptDisk = NO_DISK
    curves: Path | None = None
    """The folder of measured cost curves; None: none are measured."""


class NextPrompts:
    """Renders the likely next prompts of conversations, which an idle engine computes."""

    def __init__(self, engine: Callable[[], EngineClient]) -> None:
        self._engine = engine
        self.rendering = BackgroundWork()

    def begin(self, model: str, render: Callable[[], ComputeAhead]) -> None:
        """Renders the beginning of a next prompt in a thread and sends it to the engine. Does
        nothing if the maximum number of prompts is being rendered already."""
        if len(self.rendering) < limits.PROMPTS_AHEAD:
            self.rendering.begin(self._send(model, render))

    async def _send(self, model: str, render: Callable[[], ComputeAhead]) -> None:
        try:
            self._engine().send(await in_thread(render, model=model))
        except ServerError:
            pass  # the template or context takes no further message, or the server is busy
        except Exception:
            log.exception("the next prompt of a conversation can't be rendered")


@dataclass
class PoolEvents:
    """Called when something happens in an engine; each can be set at any time."""

    step: Callable[[StepOutput], None] = lambda step: None
    ahead: Callable[[ComputedAhead], None] = lambda computed: None
    disk_cache: Callable[[DiskCacheUse], None] = lambda use: None
    ready: Callable[[PreparedModel], None] = lambda model: None
    """Called with each model that has been loaded."""
    memory: Callable[[int], None] = lambda nbytes: None
    """Called with the bytes in use by all engines whenever they may have changed."""


class EngineModels:
    def __init__(
        self,
        entries: Mapping[str, PoolEntry],
        limits: PoolLimits,
        disk: DiskThreads,
        on_progress: OnProgress,
        make_engine: Callable[..., EngineClient],
        events: PoolEvents,
        *,
        memory_changed: Callable[[], None],
        share_memory: Callable[[], Coroutine[None, None, object]],
        part: Callable[[int], int],
        group: RankGroup | None = None,
    ) -> None:
        """share_memory: see `Pool`. part: returns these models' part of a memory budget in bytes.
        group: the ranks of the model, if it runs on several machines."""
        self.entries = entries
        self.group = group
        self._part = part
        self._limits = limits if group is None else replace(limits, prompt_disk=NO_DISK)
        self._make_engine = make_engine
        self._events = events
        self._share_memory = share_memory
        self._successor: socket.socket | None = None
        self._is_relayed = False
        """Whether the engine is that of the server that takes this one's place."""
        self._others = self._returning = 0
        """The bytes that other servers of the data directory take, and of these the bytes of
        servers that end when their answers have."""
        self.preparation = ModelPreparation(
            disk,
            lambda: self.engine,
            self._running,
            lambda: self.policy,
            lambda: self.scheduler.check_open(),
            on_progress,
        )
        self.budget = self._budget(None, 0)
        self.scheduler = MemoryScheduler(
            entries,
            self.preparation,
            Policy(
                {id: ModelFacts(0, e.spec.pinned, e.spec.ttl) for id, e in entries.items()},
                budget=self.budget.nbytes,
                wait_seconds=limits.wait_seconds,
                tier_wait=limits.tier_wait,
            ),
            lambda: self.engine,
            lambda model: events.ready(model),
            memory_changed,
            self._claim,
        )
        self.readmission = Readmission(self._running)
        self.next_prompts = NextPrompts(lambda: self.engine)
        self.supervisor = Supervisor(self._spawn, self.scheduler.engine_lost, self._restarted)

    @property
    def engine(self) -> EngineClient:
        return self.supervisor.client

    @property
    def policy(self) -> Policy:
        return self.scheduler.policy

    async def _running(self) -> EngineClient:
        """The engine, or the next one if that was lost. A group whose machines have not all been
        there yet is not waited for."""
        if self.group is None or self.supervisor.ready:
            await self.supervisor.running()
        self.scheduler.check_open()
        return self.engine

    def views(self) -> Iterator[ModelView]:
        """The models as clients see them."""
        offset = time.time() - now()  # the policy's clock is that of the event loop
        for id, entry in self.entries.items():
            prepared, model = entry.prepared, self.policy.models[id]
            stale_at = self.policy.stale_at(id)
            yield ModelView(
                spec=entry.spec,
                family=prepared.family.name if prepared else None,
                state="preparing" if entry.preparing and not prepared else model.state,
                leases=model.leases,
                nbytes=model.nbytes,
                last_used=None if model.last_used is None else model.last_used + offset,
                stale_at=None if stale_at is None else stale_at + offset,
                progress=entry.progress,
                error=entry.failure.message if entry.failure else None,
                adapters=self.scheduler.adapters.loaded_for(id),
                batching=entry.batching,
                prefilling=self.scheduler.leases.prefilling(id),
            )

    async def start(self) -> None:
        """Starts the engine, and preloads models. Raises ServerError or OSError if the engine can't
        be started. For a group, whose other machines may be started later, it logs the error
        instead and keeps trying."""
        try:
            await self.supervisor.start()
        except (ServerError, OSError) as error:
            if self.group is None:
                raise
            self.supervisor.keep_trying(error)
            return
        self._set_budget()
        self._limit()
        budget = self.budget
        scope = f" of {', '.join(self.entries)} on each machine" if self.group else ""
        log.info("memory budget%s: %s, %s", scope, size(budget.nbytes), budget.source)
        if warning := budget.warning:
            log.warning(warning)
        self._started()

    @property
    def taken(self) -> int:
        """The bytes that models and rows take here."""
        return 0 if self._is_relayed else self.policy.used - self.policy.cache

    @property
    def lacks_memory(self) -> bool:
        """Whether requests wait for memory while a server that is leaving has some."""
        waiting = {each.entry.spec.id for each in self.scheduler.waiting.values()}
        states = {self.policy.models[id].state for id in waiting}
        return self._returning > 0 and not states <= {"loading"}

    def relay(self, successor: socket.socket) -> None:
        """Ends the engine; its rows go on in that of the server that takes this one's place."""
        log.info("the new server needs the memory of this one, and goes on with its answers")
        self._successor = successor
        self.supervisor.replace()

    def leave(self, nbytes: int, returning: int) -> None:
        """Leaves these bytes of the machine's memory to other servers, and expects some back."""
        if self._is_relayed:
            nbytes = returning = 0
        if (nbytes, returning) == (self._others, self._returning):
            return
        self._others, self._returning = nbytes, returning
        self._set_budget()
        if self.supervisor.ready:
            with suppress(EngineDied):
                self.engine.send(LimitMemory(self.budget.mlx_limit))
            self._limit()

    def _limit(self) -> None:
        ready, others = self.supervisor.ready, self._others - self._returning
        later = self._budget(ready.recommended_bytes if ready else None, others)
        budget = self.budget.nbytes
        self.scheduler.do(self.policy.limit(budget, now(), later.nbytes - budget))

    def retire(self) -> None:
        """Unloads models as soon as no request uses them, since no new ones come."""
        for id in self.entries:
            self.scheduler.do(self.policy.keep(id, 0, now()))

    async def _claim(self) -> None:
        """Tells other servers of a model that is about to be loaded. Raises Overloaded if one of
        them has taken the memory since it was found to be free."""
        before = self._others
        await self._share_memory()
        if self._others > before and self.policy.in_use > self.policy.budget:
            raise Overloaded(
                "Another server has just taken the memory for this model. Send the request again."
            )

    async def stop(self, error: ServerError | None) -> None:
        """Ends the engine. Waiting and later requests raise `error`, by default ShuttingDown."""
        self.scheduler.close(error or ShuttingDown("The server is shutting down."))
        await cancelled(e.preparing for e in self.entries.values() if e.preparing)
        await self.supervisor.stop(error)
        await self.scheduler.background.stop()
        await self.next_prompts.rendering.stop()

    def _budget(self, recommended: int | None, others: int) -> MemoryBudget:
        """The budget of these models. recommended: Metal's recommended bytes, the least of all
        machines of a group. others: the bytes that other servers take."""
        whole = memory_budget(self._limits.budget, recommended, others)
        return replace(whole, nbytes=self._part(whole.nbytes))

    def _set_budget(self) -> None:
        if ready := self.supervisor.ready:
            self.preparation.upcast = not ready.gpu
            self.budget = self._budget(ready.recommended_bytes, self._others)
            whole = memory_budget(self._limits.budget, ready.recommended_bytes, self._others)
            part = "" if self.budget == whole else f"a part of {size(whole.nbytes)}, "
            self.scheduler.budget_origin = part + whole.origin

    def _spawn(self) -> EngineClient:
        most = self._limits.prompt_cache
        arguments = WorkerArguments(
            self._limits.concurrency,
            self.budget.nbytes if most is None else most,
            self._limits.prompt_disk,
            str(self._limits.curves or ""),
            self._limits.tier_wait,
            self.group,
        )
        successor, self._successor = self._successor, None
        self._is_relayed = successor is not None
        client = self._make_engine(arguments=arguments, successor=successor)
        client.on_disk_cache = lambda use: self._events.disk_cache(use)
        client.on_ahead = lambda computed: self._events.ahead(computed)
        client.on_step = self._stepped
        client.on_prefill = self.scheduler.leases.prefilled
        client.on_device_failed = self._device_failed
        return client

    def _device_failed(self, failure: DeviceFailed) -> None:
        self.readmission.lose()
        self.scheduler.device_failed(failure)

    def _stepped(self, step: StepOutput) -> None:
        self.scheduler.stepped(step)
        self._events.step(step)

    def _restarted(self, why: str, seconds: float) -> None:
        what = "%s Another one (process %s) goes on after %.1f s. Requests: %d."
        log.warning(what, why, self.engine.pid, seconds, self.readmission.present)
        if self.group:  # its machines may have been started after the server
            self._set_budget()
            self._limit()
        self._started()

    def _started(self) -> None:
        with suppress(EngineDied):
            self.engine.send(LimitMemory(self.budget.mlx_limit))
        self.scheduler.limit_cache()
        for entry in self.entries.values():
            if entry.spec.preload and not self._is_relayed:
                self.scheduler.background.begin(self._preload(entry))

    async def _preload(self, entry: PoolEntry) -> None:
        with suppress(ServerError):  # `preparation` has logged it
            await self.preparation.prepared(entry)
            id = entry.spec.id
            self.scheduler.do(self.policy.preload(id, now()))
            needed, free = self.policy.models[id].nbytes, self.policy.budget - self.taken
            if self.policy.models[id].state == "unloaded" and needed > free:
                what = (
                    "%s is not preloaded: it needs %s, and %s of the memory budget are free (%s)."
                )
                log.warning(what, id, size(needed), size(max(0, free)), self.budget.source)
