"""Which models are in memory, who uses them, and how many answers may wait.

`Policy` decides; here its decisions are carried out, by the engine that the supervisor keeps.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import Stepped
from mlx_server.engine.supervisor import Supervisor
from mlx_server.errors import (
    AdapterNotFound,
    BadRequest,
    EngineDied,
    ModelNotFound,
    NotEnoughMemory,
    Overloaded,
    ServerError,
    ShuttingDown,
    Unavailable,
)
from mlx_server.lora.catalog import AdapterSpec, Catalog, Place
from mlx_server.pool import policy
from mlx_server.pool.adapters import Adapter, Adapters, allowed_folder, find
from mlx_server.pool.entry import Entry, Model, OnProgress, Progress, View, Waiter
from mlx_server.pool.memory import machine_budget
from mlx_server.pool.policy import Facts, Policy
from mlx_server.pool.prepare import ModelSpec, Prepared, catalog_on_disk, prepare

log = logging.getLogger("mlx_server.pool")

T = TypeVar("T")

STOP_SECONDS = 0.2
"""For a download to notice that the server stops."""

CACHE_SHARE = 0.2
"""Of the machine's budget, what the prompt cache may grow to while nobody else wants it."""


@dataclass(frozen=True)
class Limits:
    concurrency: int = 16
    """Rows of one model that are decoded together."""
    queue: int = 64
    """Answers that may wait beside those."""
    wait_seconds: float = 300.0
    """For memory that others hold."""
    budget: int | None = None
    """Bytes for weights and caches; None: what suits the machine."""


class Pool:
    def __init__(
        self,
        specs: Iterable[ModelSpec],
        limits: Limits | None = None,
        on_progress: OnProgress = lambda *progress: None,
        adapter_dirs: Sequence[Path] = (),
    ) -> None:
        """adapter_dirs: folders of which a request may name a folder as its adapter."""
        self._entries = {spec.id: Entry(spec) for spec in specs}
        self._names = {n: id for id, e in self._entries.items() for n in (id, *e.spec.aliases)}
        self._limits = limits or Limits()
        self._most_rows = self._limits.concurrency + self._limits.queue
        self._on_progress = on_progress
        self._adapter_dirs = adapter_dirs
        self._added: set[tuple[str, str]] = set()
        """Models' adapters that clients have brought."""
        self._upcast = False
        self._tickets = count()
        self._waiting: dict[policy.Ticket, Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._policy = self._policy_for(0)
        self._cache_bytes = 0
        """Of the prompt cache."""
        self._cache_room: int | None = None
        """That this engine was told it has for the prompt cache."""
        self.adapters = Adapters(lambda: self.engine, self._count_adapters)
        self._closed: ServerError | None = None
        self._threads: set[asyncio.Future[Any]] = set()
        self.rows = 0
        """Answers being generated or waiting for it."""
        self.on_step: Callable[[Stepped], None] = lambda step: None
        self.make_engine: Callable[..., EngineClient] = EngineClient
        self.supervisor = Supervisor(self._spawn, self._engine_lost, self._started)

    @property
    def engine(self) -> EngineClient:
        return self.supervisor.client

    @property
    def specs(self) -> list[ModelSpec]:
        return [entry.spec for entry in self._entries.values()]

    @property
    def loaded(self) -> list[Model]:
        return [entry.model for entry in self._entries.values() if entry.model]

    async def start(self) -> None:
        ready = await self.supervisor.start()
        self._upcast = not ready.metal
        self._policy = self._policy_for(machine_budget(ready.recommended_bytes))
        self._started()

    async def stop(self, error: ServerError | None = None) -> None:
        """Whoever waits, and whoever comes later, gets `error`."""
        self._closed = error or ShuttingDown("The server is shutting down.")
        if self._timer:
            self._timer.cancel()
        for waiter in self._waiting.values():
            waiter.refuse(copy(self._closed))
        await _cancelled(e.preparing for e in self._entries.values() if e.preparing)
        await self.supervisor.stop(error)
        if self._threads:
            await asyncio.wait(self._threads, timeout=STOP_SECONDS)
        await _cancelled(self._work)

    def spec(self, name: str) -> ModelSpec:
        """By id or alias."""
        return self._entry(name).spec

    def views(self) -> list[View]:
        now = time.time() - _now()
        views = self._policy.views()
        return [self._view(entry, views[id], now) for id, entry in self._entries.items()]

    def memory(self) -> dict[str, int]:
        """Bytes: the budget, and what is counted against it."""
        return {
            "budget": self._policy.budget,
            "used": self._policy.used,
            "kv_reserved": self._policy.kv_reserved,
            "prompt_cache": self._policy.cache,
        }

    @contextmanager
    def place(self, rows: int) -> Iterator[None]:
        """Room for so many answers, or an error at once."""
        if rows > self._most_rows:
            raise BadRequest(
                f"One request may ask for at most {self._most_rows} answers here, not {rows}: "
                "send fewer prompts, or a smaller `n`."
            )
        if self.rows + rows > self._most_rows:
            raise Overloaded(f"The queue is full: {self.rows} answers are under way or waiting.")
        self.rows += rows
        try:
            yield
        finally:
            self.rows -= rows

    async def prepared(self, name: str) -> Prepared:
        """The model's files, fetched and read once however many ask."""
        entry = self._entry(name)
        self._check_open()
        if entry.preparing is None:
            entry.preparing = asyncio.create_task(self._prepare(entry))
            # a preload that fails has been logged, and may have nobody waiting for it
            entry.preparing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(entry.preparing)

    def named(self, name: str) -> tuple[str, str | None]:
        """A model and its adapter, of `model:adapter`; what is a model's own name is no more."""
        model, _, adapter = name.rpartition(":")
        is_both = adapter and name not in self._names and model in self._names
        return (model, adapter) if is_both else (name, None)

    async def adapter(self, prepared: Prepared, asked: str) -> Adapter:
        """Its files, looked at anew if they have changed."""
        catalog = _catalog_of(prepared)
        return await self._in_thread(partial(find, catalog, asked, self._adapter_dirs))

    async def adapter_names(self, id: str) -> list[str]:
        """Of those that the model can be asked for. Nothing is fetched for it."""
        entry = self._entries[id]

        def names() -> list[str]:
            if entry.prepared:
                catalog = entry.prepared.adapters
            else:  # kept, since it knows what it has read
                catalog = entry.on_disk = entry.on_disk or catalog_on_disk(entry.spec)
            found = catalog.all() if catalog else {}
            return [name for name, spec in found.items() if isinstance(spec, AdapterSpec)]

        return await self._in_thread(names)

    async def add_adapter(self, id: str, name: str, path: str) -> AdapterSpec:
        catalog = _catalog_of(await self.prepared(id))
        folder = allowed_folder(path, self._adapter_dirs)
        if name in catalog.places() and (id, name) not in self._added:
            raise BadRequest(f"{id} has an adapter {name!r} already.", param="lora_name")
        spec = await self._in_thread(partial(catalog.add, name, Place(folder)))
        self._added.add((id, name))
        return spec

    async def remove_adapter(self, id: str, name: str) -> None:
        """Returns when no row uses it any more and its memory is back."""
        if (id, name) not in self._added:
            raise AdapterNotFound(
                f"{name[:100]!r} was not loaded by a client, so no client can unload it.",
                param="lora_name",
            )
        self._added.remove((id, name))
        _catalog_of(await self.prepared(id)).remove(name)
        await self.adapters.drop(id, name)

    @asynccontextmanager
    async def lease(
        self, prepared: Prepared, kv_bytes: int, adapter: Adapter | None = None, rows: int = 1
    ) -> AsyncIterator[Model]:
        """The model, loaded, and its adapter, with so much memory beside them for each of the
        rows, until the block is left."""
        self._check_open()
        _ = self.engine  # raises while there is none, which nobody could tell of a load
        ticket = next(self._tickets)
        waiter = Waiter(self._entries[prepared.id], asyncio.get_running_loop().create_future())
        self._waiting[ticket] = waiter
        try:
            beside = adapter.spec.nbytes if adapter else 0
            self._do(
                self._policy.request(
                    ticket, prepared.id, kv_bytes, _now(), rows=rows, beside=beside
                )
            )
            model = await waiter.model
            async with self.adapters.lease(prepared.id, adapter) if adapter else nullcontext():
                yield model
        finally:
            self._waiting.pop(ticket, None)
            self._do(self._policy.cancel(ticket, _now()))
            self._do(self._policy.release(ticket, _now()))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Like to_thread, but `stop` can wait for what goes on after its task was cancelled."""
        running = asyncio.get_running_loop().run_in_executor(None, work)
        self._threads.add(running)
        running.add_done_callback(self._threads.discard)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(running)

    def _check_open(self) -> None:
        if self._closed:
            raise copy(self._closed)

    def _entry(self, name: str) -> Entry:
        if name not in self._names:
            listed = ", ".join(self._entries) or "none"
            raise ModelNotFound(
                f"The model {name[:100]!r} is not served here. Served: {listed}. "
                "List it in models.yaml, or name it to `mlx-server serve`.",
                param="model",
            )
        return self._entries[self._names[name]]

    def _policy_for(self, machine: int) -> Policy:
        return Policy(
            {e.spec.id: Facts(0, e.spec.pinned, e.spec.ttl) for e in self._entries.values()},
            budget=self._limits.budget or machine,
            max_waiting=self._most_rows,
            wait_seconds=self._limits.wait_seconds,
        )

    def _spawn(self) -> EngineClient:
        cache_bytes = int(CACHE_SHARE * (self._limits.budget or machine_budget(None)))
        client = self.make_engine(concurrency=self._limits.concurrency, cache_bytes=cache_bytes)
        client.on_step = self._stepped
        return client

    def _stepped(self, step: Stepped) -> None:
        self._cache_bytes = step.cache_bytes
        self._count_idle()
        self.on_step(step)

    def _count_adapters(self) -> None:
        for model in self.loaded:
            id = model.prepared.id
            self._do(self._policy.beside(id, self.adapters.staying_bytes(id), _now()))
        self._count_idle()

    def _count_idle(self) -> None:
        """What gives way to whoever needs memory."""
        self._do(self._policy.cache_bytes(self._cache_bytes + self.adapters.idle_bytes))

    def _engine_lost(self) -> None:
        for task in self._work:  # a load may have ended, and not have been taken note of yet
            task.cancel()
        for entry in self._entries.values():
            entry.model = entry.progress = None
        self._cache_bytes, self._cache_room = 0, None
        self.adapters.forget()
        for ticket, waiter in self._waiting.items():
            self._policy.cancel(ticket, _now())
            waiter.refuse(EngineDied("The engine process was lost. Send the request again."))
        self._do(self._policy.engine_lost(_now()))

    def _started(self) -> None:
        with suppress(EngineDied):
            self.engine.limit_memory(self._policy.budget)
        self._preload()

    def _preload(self) -> None:
        for entry in self._entries.values():
            if entry.spec.preload:
                self._begin(self._preload_one(entry))

    async def _preload_one(self, entry: Entry) -> None:
        with suppress(ServerError):  # it has been logged
            await self.prepared(entry.spec.id)
            self._do(self._policy.preload(entry.spec.id, _now()))

    async def _prepare(self, entry: Entry) -> Prepared:
        report = self._reporter(entry)
        entry.failure = None
        try:
            prepared = await self._in_thread(
                partial(prepare, entry.spec, report, upcast=self._upcast)
            )
        except asyncio.CancelledError:
            self._check_open()
            raise
        except Exception as error:
            entry.preparing = None  # the next one to ask tries again
            failure = self._failed(entry, error)
            raise failure from None
        entry.prepared, entry.progress = prepared, None
        self._policy.estimate(entry.spec.id, prepared.weights)
        return prepared

    def _failed(self, entry: Entry, error: Exception) -> ServerError:
        """Notes it down; returns what is told of it."""
        if isinstance(error, ServerError):
            log.error("%s: %s", entry.spec.id, error.message)
        else:
            log.error("%s can't be used", entry.spec.id, exc_info=error)
            error = ServerError(
                f"{entry.spec.id} can't be used: an error that the server did not expect. Its log "
                "tells more."
            )
        entry.failure, entry.progress = copy(error), None
        return error

    def _do(self, actions: policy.Actions) -> None:
        if self._closed:
            return
        for action in actions:
            match action:
                case policy.Load(model):
                    self._begin(self._load(self._entries[model]))
                case policy.Unload(model):
                    self._begin(self._unload(self._entries[model]))
                case policy.ShrinkCache(to_bytes):
                    self._shrink(to_bytes)
                case policy.Grant(ticket):
                    self._waiting.pop(ticket).grant()
                case policy.Refuse(ticket, reason):
                    self._waiting.pop(ticket).refuse(self._refusal(reason))
        self._limit_cache()
        self._set_timer()

    def _shrink(self, to_bytes: int) -> None:
        """The prompt cache first, then idle adapters."""
        self.adapters.shrink(to_bytes)
        left = max(0, to_bytes - self.adapters.idle_bytes)
        self._cache_bytes = min(self._cache_bytes, left)

    def _limit_cache(self) -> None:
        """The engine keeps to it by itself, and is told before anybody else who gets memory."""
        others = self._policy.used - self._policy.cache + self.adapters.idle_bytes
        room = max(0, self._policy.budget - others)
        if room != self._cache_room:
            with suppress(EngineDied):
                self.engine.limit_cache(room)
                self._cache_room = room

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _load(self, entry: Entry) -> None:
        prepared = entry.prepared
        assert prepared is not None
        report = self._reporter(entry)
        entry.failure = None
        try:
            loaded = await self.engine.load(
                prepared.id,
                str(prepared.path),
                lambda done, total: report("loading", done, total),
                sorted(prepared.family.stops(prepared.checkpoint)),
            )
        except Unavailable:
            return  # the engine is gone; `_engine_lost` sees to it, if this is not the end
        except Exception as error:
            self._failed(entry, error)
            self._do(self._policy.load_failed(prepared.id, _now()))
            return
        log.info(
            "%s is ready: family %s, %d MB",
            prepared.id,
            prepared.family.name,
            loaded.nbytes / 1e6,
        )
        entry.model = Model(prepared, loaded.vocabulary, loaded.nbytes)
        entry.progress = None
        self._do(self._policy.loaded(prepared.id, loaded.nbytes, _now()))

    async def _unload(self, entry: Entry) -> None:
        entry.model = None
        self.adapters.forget(entry.spec.id)
        with suppress(Unavailable):
            await self.engine.unload(entry.spec.id)
            log.info("%s was unloaded", entry.spec.id)
            self._do(self._policy.unloaded(entry.spec.id, _now()))

    def _refusal(self, reason: policy.Reason) -> ServerError:
        match reason:
            case policy.NeverFits(needed, available):
                return NotEnoughMemory(
                    f"This needs {_size(needed)}, and at most {_size(available)} can be had: ask "
                    "for fewer tokens, serve a smaller model, or raise `memory_budget` under "
                    "`server` in models.yaml."
                )
            case policy.QueueFull(waiting):
                return Overloaded(f"{waiting} requests wait for memory already.")
            case policy.WaitedTooLong(seconds):
                return Overloaded(f"No memory became free in {seconds:.0f} seconds.")
            case policy.LoadFailed(model):
                failure = self._entries[model].failure
                assert failure is not None
                return copy(failure)

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        at = self._policy.next_deadline()
        loop = asyncio.get_running_loop()
        self._timer = None if at is None else loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._do(self._policy.tick(_now()))

    def _reporter(self, entry: Entry) -> Callable[[str, int, int], None]:
        def report(what: str, done: int, total: int) -> None:
            self._check_open()  # which ends a download with the server
            entry.progress = Progress(what, done, total)
            self._on_progress(entry.spec.id, what, done, total)

        return report

    def _view(self, entry: Entry, view: policy.View, offset: float) -> View:
        prepared = entry.prepared
        return View(
            spec=entry.spec,
            family=prepared.family.name if prepared else None,
            state="preparing" if entry.preparing and not prepared else view.state,
            leases=view.leases,
            nbytes=view.nbytes,
            last_used=None if view.last_used is None else view.last_used + offset,
            progress=entry.progress,
            error=entry.failure.message if entry.failure else None,
            adapters=self.adapters.of(entry.spec.id),
        )


def _catalog_of(prepared: Prepared) -> Catalog:
    if prepared.adapters is None:
        raise AdapterNotFound(
            f"{prepared.id} plays recorded answers, and can have no adapter.", param="adapter"
        )
    return prepared.adapters


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
