"""A pool whose engine processes are a few lines, and what tests of it ask and wait for."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import (
    AdapterLoaded,
    Command,
    CommandFailed,
    KvCost,
    LimitCache,
    LoadAdapter,
    LoadModel,
    MeasureCache,
    ModelLoaded,
    PreemptRows,
    Ready,
    Report,
    ResumeRows,
    UnloadAdapter,
    Unloaded,
    UnloadModel,
    decode_commands,
    encode_commands,
)
from mlx_server.engine.worker_arguments import WorkerArguments
from mlx_server.errors import EngineDied, ServerError
from mlx_server.pool import scheduler
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.lease import MemoryDemand
from mlx_server.pool.models import LoadedModel, ModelView, OnProgress
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec

WEIGHTS = 60
"""Bytes of every model, but of the one that is called huge."""


class Bytes(KvCost):
    """Tokens of one byte, with no room to grow."""

    def for_tokens(self, n: int) -> int:
        return n


BYTES = Bytes(1)
ONE = PoolLimits(budget=100)
"""Room for one model, and a little next to it."""


TWO = PoolLimits(budget=200)


class Machine:
    """What engine processes do, and what was asked of them; can keep its replies back."""

    def __init__(self) -> None:
        self.engines: list[EngineClient] = []
        self.log: list[str] = []
        self.memory: dict[str, int] = {}
        self.most = 0
        self.broken: set[str] = set()
        """Models that do not load."""
        self.blames_files = False
        self.cached = 0
        """Bytes in the prompt cache."""
        self.room = 0
        """Bytes that it may hold."""
        self.arguments = WorkerArguments()
        self.most_padding: dict[str, int | None] = {}
        """Tokens by which the rows of each model may be padded."""
        self.silent = False
        self._kept: list[tuple[Engine, Report]] = []
        self._news = asyncio.Event()

    def engine(self, arguments: WorkerArguments, **_: object) -> EngineClient:
        self.arguments = arguments
        self.memory.clear()
        self.engines.append(Engine(self))
        return self.engines[-1]

    def report(self, report: Report) -> None:
        """The present engine's process reports this."""
        self._say(self.engines[-1], report)

    def kill(self) -> None:
        self.engines[-1]._die(EngineDied("The engine process died."))

    def take(self, engine: "Engine", command: Command) -> None:
        match command:
            case LoadModel(model):
                self.log.append(f"load {model}")
                self.most_padding[model] = command.most_padding
                self.memory[model] = WEIGHTS
                self.most = max(self.most, sum(self.memory.values()))
                self._reply(engine, self._loaded(model))
            case UnloadModel(model):
                self.log.append(f"unload {model}")
                self._reply(engine, Unloaded(model))
            case LoadAdapter(model, adapter):
                self.log.append(f"load {model} {adapter}")
                self._reply(engine, AdapterLoaded(model, adapter, 20))
            case UnloadAdapter(model, adapter):
                self.log.append(f"unload {model} {adapter}")
                self._reply(engine, Unloaded(model, adapter))
            case PreemptRows(rows):
                self.log.append(f"preempt {rows}")
            case ResumeRows(rows):
                self.log.append(f"resume {rows}")
            case LimitCache(max_bytes):
                self.room = max_bytes
                if max_bytes < self.cached:
                    self.cached = max_bytes
                    self.log.append(f"shrink to {max_bytes}")
        self._news.set()

    async def asked(self, command: str, times: int = 1) -> None:
        while self.log.count(command) < times:
            self._news.clear()
            await self._news.wait()

    def speak(self) -> None:
        self.silent = False
        kept, self._kept = self._kept, []
        for engine, report in kept:
            self._reply(engine, report)

    def _loaded(self, model: str) -> Report:
        if model in self.broken:
            return CommandFailed("LoadModel", model, "no room", of_files=self.blames_files)
        return ModelLoaded(model, vocabulary=500, nbytes=WEIGHTS)

    def _reply(self, engine: "Engine", report: Report) -> None:
        if self.silent:
            self._kept.append((engine, report))
        elif engine.alive:
            asyncio.get_running_loop().call_soon(self._say, engine, report)

    def _say(self, engine: EngineClient, report: Report) -> None:
        if engine.alive:
            if isinstance(report, Unloaded | CommandFailed) and not report.adapter:
                del self.memory[report.model]
            engine._dispatch(report)


class Engine(EngineClient):
    """The real client, without a process and a socket."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self.ended_with: list[ServerError | None] = []

    async def start(self) -> Ready:
        self._serves = True
        return Ready(1, gpu=False, recommended_bytes=None)

    async def stop(self, error: ServerError | None = None) -> None:
        self.ended_with.append(error)
        await super().stop(error)

    async def kv_cost(self, command: MeasureCache) -> KvCost:
        return BYTES

    def send(self, command: Command) -> None:
        if self._death:
            raise self._death
        (sent,) = decode_commands(encode_commands([command]))
        self._machine.take(self, sent)


@asynccontextmanager
async def running(
    *specs: ModelSpec,
    limits: PoolLimits = TWO,
    on_progress: OnProgress = lambda *progress: None,
    silent: bool = False,
    adapter_dirs: Sequence[Path] = (),
) -> AsyncIterator[tuple[Pool, Machine]]:
    """A pool that has started; afterwards nothing of it may be left, and nothing unheard."""
    pool, machine = Pool(specs, limits, on_progress, adapter_dirs), Machine()
    pool.make_engine = machine.engine
    machine.silent = silent
    unheard: list[dict[str, Any]] = []
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
    loop.set_exception_handler(lambda loop, context: unheard.append(context))
    await pool.start()
    try:
        async with asyncio.timeout(20):
            yield pool, machine
    finally:
        await pool.stop()
    await asyncio.wait([*(asyncio.all_tasks() - before), asyncio.ensure_future(asyncio.sleep(0))])
    assert_idle(pool)
    assert pool.engines[0].scheduler.timer is None or pool.engines[0].scheduler.timer.cancelled()
    gc.collect()
    assert unheard == []


def assert_idle(pool: Pool) -> None:
    assert (pool.row_slots.taken, pool.memory()["kv_reserved"]) == (0, 0)
    assert [view.leases for view in pool.views()] == [0] * len(pool.models.specs)
    assert (pool.engines[0].policy.waiting, pool.engines[0].scheduler.waiting) == ((), {})


def asks(kv_bytes: int, most: int | None = None) -> MemoryDemand:
    return MemoryDemand(BYTES, kv_bytes, kv_bytes if most is None else most)


async def held(pool: Pool, name: str = "a", kv_bytes: int = 0, rows: int = 1) -> LoadedModel:
    with pool.row_slots.take(rows):
        prepared = await pool.prepared(name)
        async with pool.lease(prepared, asks(kv_bytes)) as lease:
            return lease.model


def asking(
    pool: Pool, name: str = "a", kv_bytes: int = 0, rows: int = 1
) -> asyncio.Task[LoadedModel]:
    return asyncio.create_task(held(pool, name, kv_bytes, rows))


class Holding:
    """A lease that is held until it is let go."""

    def __init__(self, pool: Pool, name: str = "a", kv_bytes: int = 0) -> None:
        self._ask = (pool, name, kv_bytes)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Holding":
        pool, name, kv_bytes = self._ask
        self._stack.enter_context(pool.row_slots.take(1))
        prepared = await pool.prepared(name)
        lease = await self._stack.enter_async_context(pool.lease(prepared, asks(kv_bytes)))
        self._begin = partial(pool.engines[0].scheduler.leases.begin, lease.ticket)
        return self

    def begin(self) -> None:
        """Reports that its rows were sent to the engine."""
        self._begin()

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def let_go(self) -> None:
        await self._stack.aclose()


def view(pool: Pool, name: str = "a") -> ModelView:
    return next(view for view in pool.views() if view.spec.id == name)


def state(pool: Pool, name: str = "a") -> str:
    return view(pool, name).state


async def results(*tasks: Awaitable[LoadedModel]) -> list[LoadedModel | BaseException]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def turns(count: int = 20) -> None:
    """As many turns of the loop as anything that is due could want."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Of what a thread does; the whole test has its time limit."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def waiting(pool: Pool, count: int) -> None:
    await until(lambda: len(pool.engines[0].policy.waiting) >= count)


async def cancelled(task: asyncio.Task[LoadedModel]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def advance(seconds: float) -> None:
    """So much time passes at once."""
    real = vars(scheduler)["monotonic"]
    vars(scheduler)["monotonic"] = lambda: real() + seconds
    sleep_through(seconds)


def sleep_through(seconds: float) -> None:
    """Only the loop's clock goes on, as uvloop's does while a Mac sleeps."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]
