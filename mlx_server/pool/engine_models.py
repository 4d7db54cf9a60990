"""One engine process and its models: their memory, their leases, loads and restarts.

The models of one machine share one engine. A model over several machines has one of its own, whose
process is rank 0 of a group, so that others are not slowed by it.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from mlx_server.engine.client import NO_DISK, EngineClient
from mlx_server.engine.messages import StepOutput
from mlx_server.engine.rank_group import RankGroup
from mlx_server.engine.supervisor import Supervisor
from mlx_server.errors import EngineDied, ServerError, ShuttingDown
from mlx_server.pool.actions import ModelFacts
from mlx_server.pool.background import cancelled
from mlx_server.pool.disk_threads import DiskThreads
from mlx_server.pool.entry import OnProgress, PoolEntry
from mlx_server.pool.memory_budget import MemoryBudget, budget_of, size
from mlx_server.pool.next_prompts import NextPrompts
from mlx_server.pool.policy import Policy
from mlx_server.pool.pool_limits import PoolLimits
from mlx_server.pool.preparation import ModelPreparation
from mlx_server.pool.prepare import PreparedModel
from mlx_server.pool.scheduler import MemoryScheduler, now

log = logging.getLogger("mlx_server.pool")


@dataclass(frozen=True)
class EngineEvents:
    """Calls of the server when an engine reports something."""

    stepped: Callable[[StepOutput], None]
    ready: Callable[[PreparedModel], None]
    """Called with the id of each model that has been loaded."""
    memory: Callable[[], None]
    """Called whenever the bytes in use may have changed."""
    attach: Callable[[EngineClient], None]
    """Called with each new client, to set the other callbacks of it."""


class EngineModels:
    def __init__(
        self,
        entries: Mapping[str, PoolEntry],
        limits: PoolLimits,
        disk: DiskThreads,
        on_progress: OnProgress,
        make_engine: Callable[..., EngineClient],
        events: EngineEvents,
        *,
        part: Callable[[int], int],
        group: RankGroup | None = None,
    ) -> None:
        """part: how many bytes of the machine's memory budget these models have. group: the ranks
        that hold the model together."""
        self.entries = entries
        self.group = group
        self._part = part
        self._limits = limits if group is None else replace(limits, prompt_disk=NO_DISK)
        self._make_engine = make_engine
        self._events = events
        self.preparation = ModelPreparation(
            disk,
            lambda: self.engine,
            lambda: self.policy,
            lambda: self.scheduler.check_open(),
            on_progress,
        )
        self.budget = self._budget(None)
        self.scheduler = MemoryScheduler(
            entries,
            self.preparation,
            self._policy_for(),
            lambda: self.engine,
            events.ready,
            events.memory,
        )
        self.next_prompts = NextPrompts(lambda: self.engine)
        self.supervisor = Supervisor(self._spawn, self.scheduler.engine_lost, self._restarted)

    @property
    def engine(self) -> EngineClient:
        return self.supervisor.client

    @property
    def policy(self) -> Policy:
        return self.scheduler.policy

    async def start(self) -> None:
        """Raises ServerError if the engine can't be started. A group is tried again and again: the
        other machines may be started later."""
        try:
            await self.supervisor.start()
        except (ServerError, OSError) as error:
            if self.group is None:
                raise
            self.supervisor.keep_trying(error)
            return
        self._set_budget()
        log.info("memory budget%s: %s, %s", self._of, size(self.budget.nbytes), self.budget.source)
        if warning := self.budget.warning:
            log.warning(warning)
        self.scheduler.policy = self._policy_for()
        self._started()

    async def stop(self, error: ServerError | None) -> None:
        """Ends the engine; requests that wait, and all later ones, get `error`."""
        self.scheduler.close(error or ShuttingDown("The server is shutting down."))
        await cancelled(e.preparing for e in self.entries.values() if e.preparing)
        await self.supervisor.stop(error)
        await self.scheduler.background.stop()
        await self.next_prompts.rendering.stop()

    @property
    def _of(self) -> str:
        return f" of {', '.join(self.entries)} on each machine" if self.group else ""

    def _budget(self, recommended: int | None) -> MemoryBudget:
        """recommended: the least of the machines that hold the models."""
        whole = budget_of(self._limits.budget, recommended)
        return replace(whole, nbytes=self._part(whole.nbytes))

    def _set_budget(self) -> None:
        if ready := self.supervisor.ready:
            self.preparation.upcast = not ready.metal
            self.budget = self._budget(ready.recommended_bytes)
            whole = budget_of(self._limits.budget, ready.recommended_bytes)
            part = "" if self.budget == whole else f"a part of {size(whole.nbytes)}, "
            self.scheduler.budget_origin = part + whole.origin

    def _policy_for(self) -> Policy:
        entries = self.entries.items()
        return Policy(
            {id: ModelFacts(0, e.spec.pinned, e.spec.ttl) for id, e in entries},
            budget=self.budget.nbytes,
            wait_seconds=self._limits.wait_seconds,
        )

    def _spawn(self) -> EngineClient:
        most = self._limits.prompt_cache
        arguments = {} if self.group is None else {"group": self.group}
        client = self._make_engine(
            concurrency=self._limits.concurrency,
            cache_bytes=self.budget.nbytes if most is None else most,
            wired=self._limits.wired,
            schedule=self._limits.schedule,
            disk=self._limits.prompt_disk,
            **arguments,
        )
        self._events.attach(client)
        client.on_step = self._stepped
        client.on_prefill = self.scheduler.leases.prefilled
        client.on_device_failed = self.scheduler.device_failed
        return client

    def _stepped(self, step: StepOutput) -> None:
        self.scheduler.stepped(step)
        self._events.stepped(step)

    def _restarted(self) -> None:
        if self.group:  # it may not have been there when the server started
            self._set_budget()
            self.policy.budget = self.budget.nbytes - self.policy.lowered
        self._started()

    def _started(self) -> None:
        with suppress(EngineDied):
            self.engine.limit_memory(self.budget.mlx_limit)
        self.scheduler.limit_cache()
        for entry in self.entries.values():
            if entry.spec.preload:
                self.scheduler.background.begin(self._preload(entry))

    async def _preload(self, entry: PoolEntry) -> None:
        with suppress(ServerError):  # it has been logged
            await self.preparation.prepared(entry)
            self.scheduler.do(self.policy.preload(entry.spec.id, now()))
