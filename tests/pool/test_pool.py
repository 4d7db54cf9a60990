"""Loading once, waiting, evicting, refusing. The engine process here is a few lines."""

import asyncio
import gc
import json
import logging
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlx_server import limits as table
from mlx_server.engine import supervisor
from mlx_server.engine.client import EngineClient
from mlx_server.engine.kv_cost import KvCost
from mlx_server.engine.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    Command,
    Generate,
    LimitCache,
    LoadAdapter,
    LoadModel,
    ModelLoaded,
    ModelLoadFailed,
    ModelLoading,
    ModelUnloaded,
    PreemptRows,
    Ready,
    Report,
    ResumeRows,
    StepOutput,
    Stop,
    Token,
    UnloadAdapter,
    UnloadModel,
    decode_commands,
    encode_commands,
)
from mlx_server.errors import (
    AdapterNotFound,
    BadRequest,
    EngineDied,
    ModelNotFound,
    ModelUnusable,
    NotEnoughMemory,
    Overloaded,
    ServerError,
    ShuttingDown,
)
from mlx_server.families.plain import PLAIN
from mlx_server.generation.plan import plan
from mlx_server.lora.catalog import AdapterSpec
from mlx_server.pool import lease as lease_of_rows
from mlx_server.pool import prepare as preparing
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.entry import LoadedModel, ModelView, OnProgress
from mlx_server.pool.lease import MemoryDemand
from mlx_server.pool.pool import Pool
from mlx_server.pool.pool_limits import PoolLimits
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest, SamplingParams
from tests.families import byte_level, write_checkpoint

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
        self.cached = 0
        """Bytes in the prompt cache."""
        self.room = 0
        """Bytes that it may hold."""
        self.limits: dict[str, int] = {}
        self.most_padding: dict[str, int | None] = {}
        """Tokens by which the rows of each model may be padded."""
        self.silent = False
        self._kept: list[tuple[Engine, Report]] = []
        self._news = asyncio.Event()

    def engine(self, **limits: int) -> EngineClient:
        self.limits = limits
        self.memory.clear()
        self.engines.append(Engine(self))
        return self.engines[-1]

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
                self._reply(engine, ModelUnloaded(model))
            case LoadAdapter(model, adapter):
                self.log.append(f"load {model} {adapter}")
                self._reply(engine, AdapterLoaded(model, adapter, 20))
            case UnloadAdapter(model, adapter):
                self.log.append(f"unload {model} {adapter}")
                self._reply(engine, AdapterUnloaded(model, adapter))
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
            return ModelLoadFailed(model, "no room")
        return ModelLoaded(model, vocabulary=500, nbytes=WEIGHTS)

    def _reply(self, engine: "Engine", report: Report) -> None:
        if self.silent:
            self._kept.append((engine, report))
        elif engine.alive:
            asyncio.get_running_loop().call_soon(self._say, engine, report)

    def _say(self, engine: "Engine", report: Report) -> None:
        if engine.alive:
            if isinstance(report, ModelUnloaded | ModelLoadFailed):
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
        return Ready(1, metal=False, recommended_bytes=None)

    async def stop(self, error: ServerError | None = None) -> None:
        self.ended_with.append(error)
        await super().stop(error)

    async def kv_cost(self, model: str, path: str, kv_bits: int | None = None) -> KvCost:
        return BYTES

    def _send(self, command: Command) -> None:
        if self._death:
            raise self._death
        (sent,) = decode_commands(encode_commands([command]))
        self._machine.take(self, sent)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        preparing, "weights_bytes", lambda path, upcast: 500 if path.name == "huge" else WEIGHTS
    )
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("m", "huge"):
        path = write_checkpoint(
            root / name,
            byte_level(),
            config={"model_type": "gpt2", "max_position_embeddings": 100},
        )
        (path / "model.safetensors").touch()
    return root


@pytest.fixture
def a(folder: Path) -> ModelSpec:
    return ModelSpec("a", str(folder / "m"), aliases=("gpt-4", "default"))


@pytest.fixture
def b(folder: Path) -> ModelSpec:
    return ModelSpec("b", str(folder / "m"))


@pytest.fixture
def huge(folder: Path) -> ModelSpec:
    return ModelSpec("huge", str(folder / "huge"))


@asynccontextmanager
async def running(
    *specs: ModelSpec,
    limits: PoolLimits = TWO,
    on_progress: OnProgress = lambda *progress: None,
    silent: bool = False,
) -> AsyncIterator[tuple[Pool, Machine]]:
    """A pool that has started; afterwards nothing of it may be left, and nothing unheard."""
    pool, machine = Pool(specs, limits, on_progress), Machine()
    pool.make_engine = machine.engine
    machine.silent = silent
    unheard: list[dict[str, Any]] = []
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
    loop.set_exception_handler(lambda loop, context: unheard.append(context))
    await pool.start()
    try:
        yield pool, machine
    finally:
        await pool.stop()
    await asyncio.wait([*(asyncio.all_tasks() - before), asyncio.ensure_future(asyncio.sleep(0))])
    assert_idle(pool)
    assert pool._scheduler.timer is None or pool._scheduler.timer.cancelled()
    gc.collect()
    assert unheard == []


def assert_idle(pool: Pool) -> None:
    assert (pool.rows, pool.memory()["kv_reserved"]) == (0, 0)
    assert [view.leases for view in pool.views()] == [0] * len(pool.specs)
    assert (pool._policy.waiting, pool._scheduler.waiting) == ((), {})


def asks(kv_bytes: int, most: int | None = None) -> MemoryDemand:
    return MemoryDemand(BYTES, kv_bytes, kv_bytes if most is None else most)


async def held(pool: Pool, name: str = "a", kv_bytes: int = 0, rows: int = 1) -> LoadedModel:
    with pool.row_slot(rows):
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
        self._stack.enter_context(pool.row_slot(1))
        prepared = await pool.prepared(name)
        lease = await self._stack.enter_async_context(pool.lease(prepared, asks(kv_bytes)))
        self._begin = partial(pool._scheduler.leases.begin, lease.ticket)
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
    await until(lambda: len(pool._policy.waiting) >= count)


async def cancelled(task: asyncio.Task[LoadedModel]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def advance(seconds: float) -> None:
    """The loop's clock goes on by so much at once."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]


# Loading


def test_a_model_is_loaded_once_for_all_who_want_it(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            assert state(pool) == "unloaded"
            tasks = [asking(pool) for _ in range(20)]
            await waiting(pool, 20)
            assert (state(pool), pool.rows, pool.loaded) == ("loading", 20, [])
            machine.speak()
            models = await asyncio.gather(*tasks)
            models.append(await held(pool, "gpt-4"))
            assert machine.log == ["load a"]
            assert all(model is models[0] for model in models)
            assert (state(pool), pool.loaded) == ("ready", [models[0]])
            assert_idle(pool)

    run(test)


def test_its_files_are_read_once_for_all_who_want_it(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    prepare = preparing.prepare

    def counted(spec: ModelSpec, *rest: Any, **more: Any) -> Any:
        reads.append(spec.id)
        return prepare(spec, *rest, **more)

    monkeypatch.setattr("mlx_server.pool.preparation.prepare", counted)

    async def test() -> None:
        async with running(a) as (pool, _):
            first, *others = await asyncio.gather(*(pool.prepared("a") for _ in range(20)))
            assert all(other is first for other in others)
            assert await pool.prepared("default") is first
            assert reads == ["a"]

    run(test)


def test_a_model_is_what_its_files_and_its_owner_say(a: ModelSpec) -> None:
    async def test() -> None:
        owned = replace(
            a, id="o", aliases=(), family="smollm2", chat_template="mine", context_length=50
        )
        async with running(a, owned) as (pool, machine):
            plain, mine = await held(pool, "a"), await held(pool, "o")
            assert (plain.vocabulary, plain.nbytes) == (500, WEIGHTS)
            assert (plain.prepared.id, plain.prepared.spec) == ("a", a)
            assert (plain.prepared.family, plain.prepared.context_length) == (PLAIN, 100)
            assert plain.prepared.checkpoint.template is None
            assert (mine.prepared.family.name, mine.prepared.context_length) == ("smollm2", 50)
            assert mine.prepared.checkpoint.template
            assert mine.prepared.checkpoint.template.source == "mine"
            assert machine.log == ["load a", "load o"]

    run(test)


def test_a_failed_load_is_told_to_all_who_wait_and_tried_again(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            machine.broken = {"a"}
            tasks = [asking(pool) for _ in range(5)]
            await waiting(pool, 5)
            machine.speak()
            errors = await results(*tasks)
            assert all(isinstance(error, ModelUnusable) for error in errors)
            assert {str(error) for error in errors} == {"Model 'a' can't be loaded: no room"}
            assert len({id(error) for error in errors}) == 5, "each has a traceback of its own"
            assert (state(pool), pool.loaded) == ("unloaded", [])
            assert view(pool).error == "Model 'a' can't be loaded: no room"
            assert_idle(pool)
            machine.broken, machine.silent = set(), True
            task = asking(pool)
            await machine.asked("load a", times=2)
            assert (state(pool), view(pool).error) == ("loading", None)
            machine.speak()
            assert (await task).prepared.id == "a"
            assert machine.log == ["load a", "load a"]

    run(test)


def test_files_that_are_repaired_are_read_again(tmp_path: Path) -> None:
    async def test() -> None:
        write_checkpoint(tmp_path, byte_level(), config={"model_type": "gpt2"})
        async with running(ModelSpec("a", str(tmp_path))) as (pool, _):
            with pytest.raises(ModelUnusable, match="safetensors"):
                await held(pool)
            assert "safetensors" in (view(pool).error or "")
            assert (state(pool), view(pool).progress) == ("unloaded", None)
            (tmp_path / "model.safetensors").touch()
            assert (await held(pool)).prepared.id == "a"
            assert view(pool).error is None

    run(test)


def test_a_model_that_is_not_measured_is_refused_and_measured_again(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: Any) -> KvCost:
        raise ModelUnusable("Model 'a' can't be loaded: no layers")

    async def test() -> None:
        async with running(a) as (pool, machine):
            with monkeypatch.context() as patched:
                patched.setattr(Engine, "kv_cost", failing)
                errors = await results(*(asking(pool) for _ in range(3)))
            assert {str(error) for error in errors} == {"Model 'a' can't be loaded: no layers"}
            assert (view(pool).error, machine.log) == ("Model 'a' can't be loaded: no layers", [])
            assert (await held(pool)).prepared.kv is BYTES
            assert view(pool).error is None

    run(test)


def test_an_unknown_family_is_told_before_anything_is_loaded(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, family="llama")) as (pool, machine):
            with pytest.raises(ServerError, match="Known families"):
                await held(pool)
            assert machine.log == []

    run(test)


def test_what_nobody_expected_of_the_files_is_an_error_and_no_end(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with running(a) as (pool, _):
            with monkeypatch.context() as patched:
                patched.setattr("mlx_server.pool.preparation.prepare", broken)
                errors = await results(*(asking(pool) for _ in range(3)))
            assert {type(error) for error in errors} == {ServerError}
            assert not any("secret" in str(error) for error in errors)
            await held(pool)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    run(test)
    assert "ZeroDivisionError: secret" in caplog.text


def test_a_load_that_fails_in_no_known_way_leaves_nobody_waiting(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> ModelLoaded:
        raise ZeroDivisionError("secret")

    async def test() -> None:
        async with running(a) as (pool, _):
            with monkeypatch.context() as patched:
                patched.setattr(EngineClient, "load", broken)
                with pytest.raises(ServerError, match="log"):
                    await held(pool)
            await held(pool)

    run(test)
    assert "ZeroDivisionError: secret" in caplog.text


def test_progress_is_told_by_model(a: ModelSpec) -> None:
    async def test() -> None:
        seen: list[tuple[str, str, int, int]] = []
        async with running(a, on_progress=lambda *progress: seen.append(progress), silent=True) as (
            pool,
            machine,
        ):
            task = asking(pool)
            await machine.asked("load a")
            machine.engines[-1]._dispatch(ModelLoading("a", 5, 10))
            assert seen == [("a", "loading", 5, 10)]
            progress = view(pool).progress
            assert progress
            assert (progress.what, progress.done, progress.total) == ("loading", 5, 10)
            machine.speak()
            await task
            assert view(pool).progress is None

    run(test)


# Names and places


@pytest.mark.parametrize("name", ["a", "gpt-4", "default"])
def test_a_model_has_several_names(a: ModelSpec, name: str) -> None:
    pool = Pool([a, replace(a, id="n", aliases=("other",))])
    assert pool.spec(name) is a
    assert pool.spec("other").id == "n"


@pytest.mark.parametrize("name", ["", "A", "gpt", "a ", "x" * 10_000])
def test_an_unknown_model_is_told_what_there_is(a: ModelSpec, b: ModelSpec, name: str) -> None:
    async def test() -> None:
        async with running(a, b) as (pool, machine):
            with pytest.raises(ModelNotFound, match=r"Served: a, b\.") as caught:
                await held(pool, name)
            assert caught.value.param == "model"
            assert len(caught.value.message) < 400
            assert machine.log == []

    run(test)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3:4b", "qwen3-4b, qwen3-8b, "),
        ("Qwen3-8B-MLX", "qwen3-8b, qwen3-4b, "),
        ("mediocre", "medium, "),
        ("x" * 10_000, ""),
    ],
)
def test_an_unknown_model_is_told_the_nearest_of_many(
    a: ModelSpec, name: str, nearest: str
) -> None:
    ids = ("qwen3-4b", "qwen3-8b", "smollm2", "gpt-oss-20b")
    specs = [replace(a, id=id, aliases=("medium",) if id == ids[1] else ()) for id in ids]
    with pytest.raises(ModelNotFound) as caught:
        Pool(specs).spec(name)
    assert f"The nearest of the 5 that are served: {nearest}" in caught.value.message
    assert len(caught.value.message) < 400


def test_where_nothing_is_served_that_is_said() -> None:
    with pytest.raises(ModelNotFound, match="Served: none"):
        Pool([]).spec("m")


def test_a_full_queue_refuses_and_a_place_that_is_left_is_taken(a: ModelSpec) -> None:
    pool = Pool([a], PoolLimits(concurrency=2, queue=3))
    with pool.row_slot(1), pool.row_slot(3):
        assert pool.rows == 4
        with pytest.raises(Overloaded, match="4 answers") as caught, pool.row_slot(2):
            pass
        assert "Retry-After" in caught.value.headers
        with pool.row_slot(2, "another client"):
            assert pool.rows == 6
        assert pool.rows == 4
        with pool.row_slot(1):
            assert pool.rows == 5
    assert pool.rows == 0
    with pool.row_slot(5):
        assert pool.rows == 5


def test_more_rows_than_can_ever_fit_are_no_matter_of_waiting(a: ModelSpec) -> None:
    pool = Pool([a], PoolLimits(concurrency=2, queue=3))
    with (
        pytest.raises(BadRequest, match="asks for 6 answers; this server allows 5"),
        pool.row_slot(6),
    ):
        pass
    assert pool.rows == 0


def test_places_and_leases_are_given_back_whatever_happens(a: ModelSpec) -> None:
    async def fails_inside(pool: Pool) -> None:
        with pool.row_slot(2):
            async with pool.lease(await pool.prepared("a"), asks(7)):
                assert pool.rows == 2
                assert (view(pool).leases, pool.memory()["kv_reserved"]) == (1, 7)
                raise ZeroDivisionError

    async def test() -> None:
        async with running(a) as (pool, _):
            with pytest.raises(ZeroDivisionError):
                await fails_inside(pool)
            assert_idle(pool)

    run(test)


# Sharing the memory


def test_two_models_in_room_for_one_take_turns(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, machine):
            for name in "abab":
                assert (await held(pool, name, kv_bytes=40)).prepared.id == name
            assert machine.log == [
                "load a",
                *("unload a", "load b"),
                *("unload b", "load a"),
                *("unload a", "load b"),
            ]
            assert machine.most == WEIGHTS
            assert (state(pool, "a"), state(pool, "b")) == ("unloaded", "ready")
            assert [model.prepared.id for model in pool.loaded] == ["b"]

    run(test)


def test_a_crowd_for_two_models_in_room_for_one_is_served(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, machine):
            names = ["a", "b"] * 15
            models = await asyncio.gather(*(held(pool, name, kv_bytes=20) for name in names))
            assert [model.prepared.id for model in models] == names
            assert machine.most == WEIGHTS

    run(test)


def test_the_next_is_not_loaded_before_the_memory_is_back(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, machine):
            await held(pool, "a")
            machine.silent = True
            task = asking(pool, "b")
            await machine.asked("unload a")
            await turns()
            assert "load b" not in machine.log
            assert (state(pool, "a"), state(pool, "b")) == ("unloading", "unloaded")
            machine.speak()
            await task

    run(test)


def test_a_model_in_use_is_not_evicted_and_who_waits_gets_his_turn(
    a: ModelSpec, b: ModelSpec
) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, machine), Holding(pool, "a") as holding:
            task = asking(pool, "b")
            await waiting(pool, 1)
            await turns()
            assert machine.log == ["load a"]
            assert state(pool, "a") == "ready"
            await holding.let_go()
            assert (await task).prepared.id == "b"
            assert machine.log == ["load a", "unload a", "load b"]

    run(test)


def test_a_pinned_model_stays(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        pinned = replace(a, pinned=True)
        async with running(pinned, b, limits=ONE) as (pool, machine):
            await held(pool, "a")
            with pytest.raises(NotEnoughMemory):
                await held(pool, "b")
            assert (machine.log, state(pool, "a")) == (["load a"], "ready")

    run(test)


def row(number: int, prompt: int = 2) -> Generate:
    return Generate(number, "a", [1] * prompt, 99, [], SamplingParams())


def step(pool: Pool, *numbers: int, finish: Stop | None = None) -> None:
    """Each of these rows gets a token."""
    tokens = [Token(number, 1, finish) for number in numbers]
    pool.engines[0]._stepped(StepOutput("a", tokens, 0, active_bytes=0, cache_bytes=0))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved for ten tokens at a time, three before they are needed."""
    monkeypatch.setattr(lease_of_rows, "SOON", 10)
    monkeypatch.setattr(lease_of_rows, "MARGIN", 3)


@pytest.mark.parametrize("budget", [100, 1000])
def test_the_engine_may_pad_rows_by_what_requests_reserve_for_it(a: ModelSpec, budget: int) -> None:
    async def test() -> None:
        async with running(a, limits=PoolLimits(budget=budget)) as (pool, machine):
            await held(pool)
            most = BYTES.most_padding(budget - WEIGHTS)
            assert machine.most_padding == {"a": most}
            request = GenerateRequest("a", ((1,) * 10,))
            planned = plan(await pool.prepared("a"), request)
            assert planned.demand.padding_bytes == BYTES.padding_bytes(most or 0)

    run(test)


@pytest.mark.usefixtures("ahead")
def test_rows_reserve_memory_as_they_grow_and_the_last_wait_for_it(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, limits=ONE) as (pool, machine):
            prepared = await pool.prepared("a")
            async with (
                pool.lease(prepared, asks(2, most=40)) as first,
                pool.lease(prepared, asks(2, most=40)) as last,
            ):
                first.began([row(1)])
                last.began([row(2), row(3)])
                assert pool.memory()["kv_reserved"] == 12 + 12
                for _ in range(7):
                    step(pool, 1)
                assert pool.memory()["kv_reserved"] == 12 + 12
                step(pool, 1, 77)
                assert pool.memory()["kv_reserved"] == 20 + 20
                for _ in range(8):
                    step(pool, 1, 3)
                assert machine.log == ["load a", "preempt [2, 3]"]
                assert pool.memory()["kv_reserved"] == 28
                last.left([3])
                last.began([row(4)])
                assert machine.log[2:] == ["preempt [4]"], "it came too late to be preempted"
                step(pool, 1, finish="stop")
                assert machine.log[3:] == ["resume [2, 4]"]
                assert pool.memory()["kv_reserved"] == 2 * 20
                last.left([2, 4])
                assert pool.memory()["kv_reserved"] == 0
            assert pool._scheduler.leases.of_row == {}

    run(test)


@pytest.mark.usefixtures("ahead")
def test_a_lost_engine_leaves_no_growth_behind(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, limits=ONE) as (pool, machine):
            async with pool.lease(await pool.prepared("a"), asks(2, most=40)) as lease:
                lease.began([row(1)])
                machine.kill()
                await turns()
                for _ in range(20):
                    step(pool, 1)
                assert pool.memory()["kv_reserved"] == 0
            assert pool._scheduler.leases.of_row == {}

    run(test)


def test_clients_take_turns_at_the_memory(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, limits=ONE) as (pool, _):
            prepared, order = await pool.prepared("a"), list[str]()

            async def one(client: str) -> None:
                async with pool.lease(prepared, replace(asks(30), client=client)):
                    order.append(client)
                    await asyncio.sleep(0)

            async with Holding(pool, "a", kv_bytes=30):
                several = [asyncio.create_task(one(client)) for client in "mmmmf"]
                await waiting(pool, 5)
            await asyncio.gather(*several)
            assert order.index("f") <= 1

    run(test)


def test_what_never_fits_is_told_at_once_with_both_sizes(a: ModelSpec, huge: ModelSpec) -> None:
    async def test() -> None:
        limits = PoolLimits(budget=2_000_000_000)
        async with running(a, huge, limits=limits) as (pool, machine), Holding(pool, "a"):
            with pytest.raises(NotEnoughMemory) as caught:
                await held(pool, "a", kv_bytes=3_000_000_000)
            assert caught.value.status == 400
            assert caught.value.message == (
                "The model needs 60 bytes, and this request 3.0 GB more; the memory budget is 2.0 "
                "GB (set by `memory_budget` in models.yaml). Raise `memory_budget` in models.yaml, "
                "or ask for fewer tokens."
            )
            assert machine.log == ["load a"]
        async with running(huge, limits=PoolLimits(budget=300)) as (pool, machine):
            with pytest.raises(NotEnoughMemory) as caught:
                await held(pool, "huge")
            assert caught.value.message == (
                "The model needs 500 bytes; the memory budget is 300 bytes (set by `memory_budget` "
                "in models.yaml). Raise `memory_budget` in models.yaml, or choose a smaller "
                "quantisation."
            )
            assert (machine.log, state(pool, "huge")) == ([], "unloaded")
        async with running(a, limits=PoolLimits()) as (pool, _):
            with pytest.raises(NotEnoughMemory) as caught:
                await held(pool, "a", kv_bytes=10**15)
            assert re.search(
                r"budget is [\d.]+ GB \(three quarters of RAM \([\d.]+ GB\) minus [\d.]+ [GM]B to "
                r"compute in\). Raise `memory_budget`",
                caught.value.message,
            )

    run(test)


def test_what_pinned_models_keep_is_told(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, pinned=True), b, limits=ONE) as (pool, _):
            await held(pool, "a")
            kept = r"100 bytes \(set by .*\), of which pinned models keep 60"
            with pytest.raises(NotEnoughMemory, match=kept):
                await held(pool, "b")

    run(test)


def test_the_budget_is_said_at_the_start(a: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        caplog.set_level(logging.INFO, "mlx_server.pool")
        async with running(a):
            assert "memory budget: 200 bytes, set by `memory_budget`" in caplog.text
            assert "WARNING" not in caplog.text
        async with running(a, limits=PoolLimits(budget=1 << 50)):
            assert "WARNING" in caplog.text
            assert "Lower `memory_budget`" in caplog.text

    run(test)


def test_waiting_for_memory_is_bounded(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        limits = replace(ONE, wait_seconds=10)
        async with running(a, b, limits=limits) as (pool, machine):
            async with Holding(pool, "a"):
                task = asking(pool, "b")
                await waiting(pool, 1)
                advance(5)
                await turns()
                assert not task.done()
                advance(6)
                with pytest.raises(Overloaded, match=r"1[1-9] seconds") as caught:
                    await task
                assert "Retry-After" in caught.value.headers
                assert machine.log == ["load a"]
            await held(pool, "b")

    run(test)


def test_the_kv_cache_of_running_answers_counts(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, limits=ONE) as (pool, _), Holding(pool, "a", kv_bytes=30) as holding:
            task = asking(pool, "a", kv_bytes=30)
            await waiting(pool, 1)
            await turns()
            assert not task.done()
            await holding.let_go()
            await task

    run(test)


def test_the_prompt_cache_gives_way_first(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b) as (pool, machine):
            await held(pool, "a")
            seen: list[StepOutput] = []
            pool.on_step = seen.append
            machine.cached = 130
            stepped = StepOutput("a", [], 0, active_bytes=190, cache_bytes=130)
            machine.engines[-1]._dispatch(stepped)
            assert seen == [stepped]
            assert pool.memory() == {
                "budget": 200,
                "used": 190,
                "kv_reserved": 0,
                "prompt_cache": 130,
                "lowered": 0,
            }
            await held(pool, "b")
            assert machine.log == ["load a", "shrink to 80", "load b"]
            assert (state(pool, "a"), pool.memory()["prompt_cache"]) == ("ready", 80)

    run(test)


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """One adapter, for any base."""
    shutil.copytree(Path(__file__).parents[2] / "adapters" / "pirate", tmp_path / "pirate")
    config = tmp_path / "pirate" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"model": None}))
    return tmp_path


def test_an_adapter_that_was_unloaded_while_its_request_waited_is_not_loaded_again(
    a: ModelSpec, samples: Path
) -> None:
    limits = replace(TWO, budget=10**9)

    async def test() -> None:
        async with running(a, limits=limits) as (pool, machine):
            pool._catalogs.allowed = [samples]
            await pool.add_adapter("a", "new", str(samples / "pirate"))
            prepared = await pool.prepared("a")
            adapter = await pool.adapter(prepared, "new")
            async with pool.lease(prepared, asks(0), adapter):
                pass
            await pool.remove_adapter("a", "new")
            with pytest.raises(AdapterNotFound):
                async with pool.lease(prepared, asks(0), adapter):
                    raise AssertionError
            await turns()
            assert pool._scheduler.adapters.loaded_for("a") == []
            loaded = f"load a {adapter.spec.digest}"
            assert machine.log == ["load a", loaded, f"un{loaded}"]
            for remove in ("new", "nobody"):
                with pytest.raises(AdapterNotFound):
                    await pool.remove_adapter("a", remove)

    run(test)


def test_clients_load_so_many_adapters_and_no_more(
    a: ModelSpec, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "ADDED_ADAPTERS", replace(table.ADDED_ADAPTERS, value=2))

    async def test() -> None:
        async with running(a) as (pool, _):
            pool._catalogs.allowed = [samples]
            for name in ("one", "two", "one"):
                await pool.add_adapter("a", name, str(samples / "pirate"))
            with pytest.raises(BadRequest, match="Clients have loaded 2 adapters"):
                await pool.add_adapter("a", "three", str(samples / "pirate"))
            await pool.remove_adapter("a", "two")
            await pool.add_adapter("a", "three", str(samples / "pirate"))


@pytest.mark.parametrize(("chosen", "most"), [(None, 200), (0, 0), (70, 70), (999, 999)])
def test_the_prompt_cache_takes_what_models_leave(
    a: ModelSpec, chosen: int | None, most: int
) -> None:
    """The engine keeps to the smaller of the two."""

    async def test() -> None:
        limits = replace(TWO, prompt_cache=chosen)
        async with running(a, limits=limits) as (pool, machine):
            assert machine.limits["cache_bytes"] == most
            assert machine.room == 200
            async with Holding(pool, "a", kv_bytes=30) as holding:
                assert machine.room == 200 - WEIGHTS, "its rows may continue what is cached"
                holding.begin()
                assert machine.room == 200 - WEIGHTS - 30
            assert machine.room == 200 - WEIGHTS

    run(test)


def test_a_cache_that_was_handed_over_keeps_to_the_room_that_there_is(a: ModelSpec) -> None:
    """The engine kept it before the rows of its lease had given their memory back."""

    async def test() -> None:
        async with running(a) as (pool, machine), Holding(pool, "a", kv_bytes=30) as holding:
            machine.cached = 130
            holding.begin()
            stepped = StepOutput("a", [], 0, active_bytes=190, cache_bytes=130)
            machine.engines[-1]._dispatch(stepped)
            assert machine.log[-1] == "shrink to 110"
            assert pool.memory()["prompt_cache"] == 110

    run(test)


def test_idle_adapters_give_way_after_the_prompt_cache_and_pinned_ones_do_not(
    a: ModelSpec, b: ModelSpec
) -> None:
    async def used(pool: Pool, name: str, pinned: bool) -> None:
        spec = AdapterSpec(name, Path(name), name, 8, 20, "lora", None, "mlx")
        async with pool.lease(await pool.prepared("a"), asks(0), LeasedAdapter(spec, pinned)):
            pass

    async def test() -> None:
        async with running(a, b) as (pool, machine):
            await used(pool, "pinned", pinned=True)
            await used(pool, "idle", pinned=False)
            assert pool.memory()["used"] == WEIGHTS + 20 + 20
            assert view(pool).nbytes == WEIGHTS + 20
            machine.cached = 50
            stepped = StepOutput("a", [], 0, active_bytes=190, cache_bytes=50)
            machine.engines[-1]._dispatch(stepped)
            await held(pool, "b")
            assert machine.log[-2:] == ["shrink to 40", "load b"]
            assert [name for name, *_ in pool._scheduler.adapters.loaded_for("a")] == [
                "pinned",
                "idle",
            ]
            async with Holding(pool, "b", kv_bytes=50) as holding:
                await turns()
                assert machine.log[-1] == "unload a idle"
                holding.begin()
                assert machine.log[-1] == "shrink to 10"
                assert [name for name, *_ in pool._scheduler.adapters.loaded_for("a")] == ["pinned"]
            await used(pool, "pinned", pinned=True)
            assert pool.memory()["prompt_cache"] == 10, "counted by its new limit"

    run(test)


def test_a_model_that_nobody_asks_for_is_unloaded_after_its_time(
    a: ModelSpec, b: ModelSpec
) -> None:
    async def test() -> None:
        async with running(replace(a, ttl=5), b) as (pool, machine):
            await held(pool, "a")
            await held(pool, "b")
            async with Holding(pool, "a"):
                advance(6)
                await turns()
                assert state(pool, "a") == "ready"
            advance(4)
            await turns()
            assert state(pool, "a") == "ready"
            advance(2)
            await machine.asked("unload a")
            await turns()
            assert (state(pool, "a"), state(pool, "b")) == ("unloaded", "ready")
            await held(pool, "a")
            assert machine.log == ["load a", "load b", "unload a", "load a"]

    run(test)


# Leaving


def test_whoever_stops_waiting_does_not_stop_the_load(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            impatient, patient = asking(pool), asking(pool)
            await waiting(pool, 2)
            await cancelled(impatient)
            assert (state(pool), pool.rows) == ("loading", 1)
            machine.speak()
            assert (await patient).prepared.id == "a"
            assert machine.log == ["load a"]

    run(test)


def test_whoever_leaves_while_it_loads_leaves_nothing_behind(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            task = asking(pool, kv_bytes=9, rows=7)
            await machine.asked("load a")
            assert pool.rows == 7
            await cancelled(task)
            assert_idle(pool)
            machine.speak()
            await held(pool)
            assert machine.log == ["load a"]

    run(test)


def test_whoever_leaves_the_line_lets_the_next_go(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, _), Holding(pool, "a", kv_bytes=20):
            first = asking(pool, "b")
            await waiting(pool, 1)
            behind = asking(pool, "a", kv_bytes=20)
            await waiting(pool, 2)
            await turns()
            assert not behind.done()
            await cancelled(first)
            await behind

    run(test)


def test_whoever_leaves_while_the_files_are_read_leaves_nothing_behind(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with running(a) as (pool, _):
            impatient, patient = asking(pool), asking(pool)
            await turns(3)
            assert (state(pool), pool.rows) == ("preparing", 2)
            await cancelled(impatient)
            assert pool.rows == 1
            await patient

    run(test)


def test_a_lease_granted_to_somebody_who_was_cancelled_is_given_back(
    a: ModelSpec, b: ModelSpec
) -> None:
    """Between the moment that a task is cancelled and the one in which it learns of it."""

    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, _), Holding(pool, "a", 30) as holding:
            task = asking(pool, "a", kv_bytes=30)
            await waiting(pool, 1)
            task.cancel()
            await holding.let_go()
            await asyncio.wait([task])
            assert task.cancelled()
            assert_idle(pool)
            await held(pool, "b")

    run(test)


def test_a_cancelled_task_that_was_just_granted_its_lease_gives_it_back(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, limits=ONE) as (pool, _), Holding(pool, "a", 30) as holding:
            task = asking(pool, "a", kv_bytes=30)
            await waiting(pool, 1)
            await holding.let_go()
            assert view(pool).leases == 1, "granted"
            await cancelled(task)
            assert_idle(pool)

    run(test)


# The engine is lost


async def started_again(pool: Pool, machine: Machine, times: int = 1) -> None:
    await until(lambda: len(machine.engines) > times and pool.supervisor.alive)


def test_a_lost_engine_is_replaced_and_models_load_on_demand(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b) as (pool, machine):
            await held(pool, "a")
            await held(pool, "b")
            machine.kill()
            assert not pool.supervisor.alive
            await started_again(pool, machine)
            assert (state(pool, "a"), state(pool, "b"), pool.loaded) == ("unloaded",) * 2 + ([],)
            await held(pool, "a")
            assert machine.log == ["load a", "load b", "load a"]
            assert pool.supervisor.restarts == 1

    run(test)


def test_those_who_wait_for_a_load_are_told_that_the_engine_is_lost(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            tasks = [asking(pool, kv_bytes=5) for _ in range(3)]
            await waiting(pool, 3)
            await machine.asked("load a")
            machine.kill()
            errors = await results(*tasks)
            assert {type(error) for error in errors} == {EngineDied}
            assert_idle(pool)
            await started_again(pool, machine)
            machine.speak()
            await held(pool)
            assert machine.log == ["load a", "load a"]

    run(test)


def test_those_who_wait_for_memory_are_told_that_the_engine_is_lost(
    a: ModelSpec, b: ModelSpec
) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, machine):
            async with Holding(pool, "a", kv_bytes=5):
                tasks = [asking(pool, "b"), asking(pool, "a", kv_bytes=40)]
                await waiting(pool, 2)
                machine.kill()
                errors = await results(*tasks)
                assert {type(error) for error in errors} == {EngineDied}
                # the lease is void, and giving it back changes nothing
                assert (view(pool).leases, pool.memory()["used"]) == (0, 0)
                await started_again(pool, machine)
                await held(pool, "b")
            assert [view.leases for view in pool.views()] == [0, 0]

    run(test)


def test_an_engine_lost_while_it_unloads(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, machine):
            await held(pool, "a")
            machine.silent = True
            task = asking(pool, "b")
            await machine.asked("unload a")
            machine.kill()
            with pytest.raises(EngineDied):
                await task
            await started_again(pool, machine)
            machine.speak()
            await held(pool, "a")
            assert machine.log == ["load a", "unload a", "load a"]

    run(test)


def test_an_engine_lost_just_after_it_said_that_it_has_loaded(a: ModelSpec) -> None:
    """The load ended well, and the pool has not heard of it when it hears of the loss."""

    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            task = asking(pool)
            await machine.asked("load a")
            machine.engines[-1]._dispatch(ModelLoaded("a", 500, WEIGHTS))
            machine.kill()
            with pytest.raises(EngineDied):
                await task
            assert (state(pool), pool.loaded) == ("unloaded", [])
            await started_again(pool, machine)
            machine.silent = False
            await held(pool)
            assert machine.log == ["load a", "load a"]

    run(test)


def test_an_engine_lost_just_after_a_lease_was_granted(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, limits=ONE) as (pool, machine), Holding(pool, "a", 30) as holding:
            prepared = await pool.prepared("a")
            reached = asyncio.Event()

            async def generating() -> None:
                async with pool.lease(prepared, asks(30)):
                    reached.set()
                    _ = pool.engine  # as the owner of a lease does next

            task = asyncio.create_task(generating())
            await waiting(pool, 1)
            machine.kill()
            await holding.let_go()
            with pytest.raises(EngineDied):
                await task

    run(test)


def test_without_an_engine_the_answer_is_an_error_and_not_a_wait(
    a: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 3600.0)

    async def test() -> None:
        async with running(a) as (pool, machine):
            await pool.prepared("a")
            machine.kill()
            for _ in range(3):
                with pytest.raises(EngineDied) as caught:
                    await held(pool)
                assert "Retry-After" in caught.value.headers
                await turns()
            assert (machine.log, state(pool)) == ([], "unloaded")

    run(test)


def test_preloads_load_again(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, preload=True), b) as (pool, machine):
            await held(pool, "b")
            await machine.asked("load a")
            machine.kill()
            await machine.asked("load a", times=2)
            await held(pool, "a")
            assert machine.log.count("load a") == 2
            assert (state(pool, "a"), state(pool, "b")) == ("ready", "unloaded")

    run(test)


def test_engines_lost_again_and_again_are_replaced(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, preload=True)) as (pool, machine):
            for times in range(1, 6):
                await machine.asked("load a", times)
                await turns(times)  # at different moments of the load
                machine.kill()
                await started_again(pool, machine, times)
            await held(pool)
            assert machine.log == ["load a"] * 6

    run(test)


# Preloading


def test_preloading_begins_at_the_start_and_only_where_asked_for(
    a: ModelSpec, b: ModelSpec
) -> None:
    async def test() -> None:
        async with running(a, replace(b, preload=True), silent=True) as (pool, machine):
            await machine.asked("load b")
            assert (state(pool, "b"), state(pool, "a")) == ("loading", "unloaded")
            machine.speak()
            assert (await held(pool, "b")).prepared.id == "b"
            assert machine.log == ["load b"]

    run(test)


@pytest.mark.parametrize("error", [ModelUnusable("No room."), OSError("No room.")])
def test_a_preload_that_fails_is_logged(
    a: ModelSpec,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    async def test() -> None:
        monkeypatch.setattr("mlx_server.pool.preparation.prepare", broken)
        async with running(replace(a, preload=True)) as (pool, machine):
            await until(lambda: view(pool).error is not None)
            monkeypatch.undo()
            assert (machine.log, state(pool)) == ([], "unloaded")

    run(test)
    assert "No room." in caplog.text
    assert "never retrieved" not in caplog.text


def test_a_preload_that_does_not_load_is_logged_and_tried_again_on_demand(
    a: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with running(replace(a, preload=True), silent=True) as (pool, machine):
            machine.broken = {"a"}
            await machine.asked("load a")
            machine.speak()
            await until(lambda: view(pool).error is not None)
            machine.broken = set()
            await held(pool)

    with caplog.at_level(logging.ERROR):
        run(test)
    assert "Model 'a' can't be loaded: no room" in caplog.text


# Stopping


def test_stopping_ends_loads_with_a_word_to_all_who_wait(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, silent=True) as (pool, machine):
            tasks = [asking(pool) for _ in range(3)]
            await waiting(pool, 3)
            error = ShuttingDown("Closing for today.")
            await pool.stop(error)
            reported = await results(*tasks)
            assert [str(each) for each in reported] == ["Closing for today."] * 3
            assert [type(each) for each in reported] == [ShuttingDown] * 3
            engine = machine.engines[-1]
            assert isinstance(engine, Engine)
            assert engine.ended_with == [error]
            assert pool.loaded == []

    run(test)


def test_stopping_tells_those_who_wait_for_memory(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, ttl=5), b, limits=ONE) as (pool, machine):
            async with Holding(pool, "a"):
                task = asking(pool, "b")
                await waiting(pool, 1)
                await pool.stop()
                with pytest.raises(ShuttingDown):
                    await task
            # nothing is begun when the last lease ends
            assert machine.log == ["load a"]
            assert pool._scheduler.timer
            assert pool._scheduler.timer.cancelled()

    run(test)


def test_stopping_tells_those_who_wait_for_the_files(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a) as (pool, machine):
            tasks = [asking(pool) for _ in range(3)]
            await turns(3)
            assert state(pool) == "preparing"
            await pool.stop()
            assert [type(each) for each in await results(*tasks)] == [ShuttingDown] * 3
            assert machine.log == []

    run(test)


def test_stopping_while_it_unloads(a: ModelSpec, b: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, b, limits=ONE) as (pool, machine):
            await held(pool, "a")
            machine.silent = True
            task = asking(pool, "b")
            await machine.asked("unload a")
            await pool.stop()
            with pytest.raises(ShuttingDown):
                await task

    run(test)


def test_stopping_while_a_preload_is_under_way(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(replace(a, preload=True), silent=True) as (pool, machine):
            await machine.asked("load a")
            await pool.stop()
            assert pool.loaded == []

    run(test)


def test_stopping_while_there_is_no_engine(a: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 3600.0)

    async def test() -> None:
        async with running(a) as (pool, machine):
            machine.kill()
            await turns()
            await pool.stop()
            assert len(machine.engines) == 1

    run(test)


def test_a_pool_that_was_stopped_takes_nobody(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a) as (pool, machine):
            prepared = (await held(pool)).prepared
            await pool.stop()
            with pytest.raises(ShuttingDown):
                await pool.prepared("a")
            with pytest.raises(ShuttingDown):
                async with pool.lease(prepared, asks(0)):
                    pass
            assert machine.log == ["load a"]

    run(test)


def test_stopping_twice_is_stopping(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a) as (pool, machine):
            await held(pool)
            await pool.stop()
            await pool.stop()
            engine = machine.engines[-1]
            assert isinstance(engine, Engine)
            assert engine.ended_with == [None, None]

    run(test)


# What the owner sees


def test_a_view_says_what_is_known(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a) as (pool, _):
            unseen = view(pool)
            assert (unseen.family, unseen.nbytes, unseen.last_used) == (None, 0, None)
            await pool.prepared("a")
            assert (view(pool).family, view(pool).nbytes) == ("plain", WEIGHTS)
            async with Holding(pool, "a"):
                assert (view(pool).leases, state(pool)) == (1, "ready")
            first = view(pool).last_used
            assert first
            advance(10)
            await held(pool)
            assert view(pool).last_used == pytest.approx(first, abs=5), "the clock of the wall"

    run(test)
