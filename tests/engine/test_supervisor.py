"""An engine that is lost is noticed, mourned once, and replaced."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mlx_server.engine import supervisor
from mlx_server.engine.client import EngineClient, RowStream
from mlx_server.engine.messages import Heartbeat, LoadModel, Ready, Report
from mlx_server.engine.supervisor import Supervisor
from mlx_server.engine.worker_arguments import WorkerArguments
from mlx_server.errors import EngineDied, ServerError
from tests.engine.clients import (
    ENDLESS,
    HANG,
    answered,
    ask,
    asynchronous,
    first_token,
    freeze,
    ignored,
)
from tests.event_loops import NewLoop, on_each_loop, run_on
from tests.live.server import eventually

pytestmark = pytest.mark.slow

FOR_EVER = 1000.0


async def everything(feed: RowStream) -> None:
    while True:
        await feed.take()


class House:
    """A supervisor, all the engines it ever had, and what it said of them."""

    def __init__(self) -> None:
        self.engines: list[EngineClient] = []
        self.events: list[tuple[str, bool]] = []
        """What happened, and whether the supervisor said then that its engine is alive."""
        self.lost = asyncio.Event()
        self.started = asyncio.Event()
        self.supervisor = Supervisor(self._spawn, self._on_lost, self._on_started)

    def _spawn(self) -> EngineClient:
        self.engines.append(EngineClient(WorkerArguments(concurrency=4)))
        return self.engines[-1]

    def _on_lost(self) -> None:
        self.events.append(("lost", self.supervisor.alive))
        self.lost.set()

    def _on_started(self, why: str, seconds: float) -> None:
        assert why
        assert seconds >= 0
        self.events.append(("started", self.supervisor.alive))
        self.started.set()

    def assert_no_process_is_left(self) -> None:
        assert not any(psutil.pid_exists(engine.pid) for engine in self.engines if engine.pid)


@asynccontextmanager
async def supervised(path: Path | None = None) -> AsyncIterator[House]:
    house = House()
    try:
        await house.supervisor.start()
        if path:
            await house.supervisor.client.load(LoadModel("tiny", str(path)), ignored)
        yield house
    finally:
        await house.supervisor.stop()
        assert not house.supervisor.alive
        house.assert_no_process_is_left()


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
@asynchronous
async def test_an_engine_lost_in_the_middle_of_an_answer_is_replaced(
    tiny_path: Path, blow: signal.Signals
) -> None:
    async with supervised(tiny_path) as house:
        old = house.supervisor.client
        assert old.pid
        async with old.generate([ask(ENDLESS)]) as feed:
            await first_token(feed)
            os.kill(old.pid, blow)
            with pytest.raises(EngineDied):
                await everything(feed)
        await house.started.wait()
        assert house.events == [("lost", False), ("started", True)]
        assert house.supervisor.restarts == 1
        assert not psutil.pid_exists(old.pid)

        new = house.supervisor.client
        await new.load(LoadModel("tiny", str(tiny_path)), ignored)
        assert len((await answered(new, ask()))[0]) == 5


@asynchronous
async def test_an_engine_stopped_while_it_starts_is_noticed_soon() -> None:
    """Before it has imported MLX, or said anything."""
    engine = EngineClient(WorkerArguments(concurrency=4))
    starting = asyncio.create_task(engine.start())
    while not engine.pid:  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(0)
    freeze(engine)
    began = asyncio.get_running_loop().time()
    with pytest.raises(EngineDied, match="was stopped"):
        await starting
    assert asyncio.get_running_loop().time() - began < 10.0
    await engine.stop()
    assert not psutil.pid_exists(engine.pid)


LEAVES_IT_STOPPED = """
import asyncio, os, signal, sys
from mlx_server.engine.client import EngineClient

async def main():
    engine = EngineClient()
    starting = asyncio.create_task(engine.start())
    if sys.argv[1] == "serving":
        await starting
    while not (engine._process and engine._process._lifeline):
        await asyncio.sleep(0)
    os.kill(engine.pid, signal.SIGSTOP)
    print(engine.pid, engine._process._lifeline._guard.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["starting", "serving"])
def test_an_engine_that_is_stopped_does_not_outlive_its_server(when: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LEAVES_IT_STOPPED, when], stdout=subprocess.PIPE, timeout=60
    )
    assert run.returncode == -signal.SIGKILL
    engine, guard = map(int, run.stdout.split())
    eventually(lambda: _gone(engine) and _gone(guard), "both are gone", seconds=10)


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@on_each_loop
def test_an_engine_whose_guard_was_killed_is_replaced_too(new_loop: NewLoop) -> None:
    run_on(new_loop, _lost_after_its_guard(), HANG)


async def _lost_after_its_guard() -> None:
    async with supervised() as house:
        process = house.supervisor.client._process
        assert process
        lifeline = process._lifeline
        assert lifeline
        lifeline._guard.kill()
        await lifeline._guard.wait()
        house.supervisor.kill()
        await house.started.wait()
        assert house.supervisor.restarts == 1


@asynchronous
async def test_an_engine_that_ends_as_it_is_killed_is_stopped_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time for its end is over in the moment in which it ends."""
    async with supervised() as house:
        process = house.supervisor.client._process
        assert process
        wait = process._process.wait

        def too_late() -> None:
            wait()
            monkeypatch.setattr(process._process, "wait", wait)
            raise TimeoutError

        monkeypatch.setattr(process._process, "wait", too_late)
        house.supervisor.kill()
        await house.started.wait()


@asynchronous
async def test_until_it_is_replaced_requests_are_turned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", FOR_EVER)
    async with supervised() as house:
        os.kill(freeze(house.supervisor.client), signal.SIGKILL)
        await house.lost.wait()
        assert not house.supervisor.alive
        with pytest.raises(EngineDied, match="restarting"):
            _ = house.supervisor.client


@asynchronous
async def test_an_engine_that_rests_is_not_given_up(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is heard of it then is its heart."""
    beats: asyncio.Queue[Report] = asyncio.Queue()
    async with supervised(tiny_path) as house:
        with monkeypatch.context() as listening:
            listening.setattr(house.supervisor.client, "_dispatch", beats.put_nowait)
            for _ in range(5):
                assert isinstance(await beats.get(), Heartbeat)
        assert len((await answered(house.supervisor.client, ask()))[0]) == 5
        assert house.events == []


@asynchronous
async def test_stopping_in_a_start_leaves_no_process() -> None:
    async with supervised() as house:
        os.kill(freeze(house.supervisor.client), signal.SIGKILL)
        while len(house.engines) < 2 or not house.engines[1].pid:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0)
        await house.supervisor.stop()
        assert house.events == [("lost", False)]
        house.assert_no_process_is_left()


class Stub(EngineClient):
    """No process; starts or fails to."""

    def __init__(self, starts: bool) -> None:
        super().__init__()
        self._starts = starts

    async def start(self) -> Ready:
        if not self._starts:
            raise EngineDied("no")
        self._serves = True
        return Ready(0, gpu=False, recommended_bytes=None)

    async def stop(self, error: ServerError | None = None) -> None:
        self._death = self._death or EngineDied("stopped")


async def pauses_of(
    engines: list[Stub], lives: list[float], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """The pauses before each start but the first; those that start live so long."""
    pauses: list[float] = []
    now, out_of_engines = 0.0, asyncio.Event()
    ahead, living = iter(engines), iter(lives)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == len(engines):
            out_of_engines.set()
            await asyncio.Event().wait()

    def dies() -> None:
        nonlocal now
        now += next(living)
        assert watched._client
        watched._client.lost.set()

    fake = SimpleNamespace(**vars(asyncio))
    fake.sleep, fake.get_running_loop = sleep, lambda: SimpleNamespace(time=lambda: now)
    monkeypatch.setattr(supervisor, "asyncio", fake)

    def soon(*_: object) -> None:
        asyncio.get_running_loop().call_soon(dies)

    watched = Supervisor(lambda: next(ahead), on_started=soon)
    await watched.start()
    soon()
    await out_of_engines.wait()
    assert watched.restarts == len(engines) - 1
    await watched.stop()
    return pauses


@asynchronous
async def test_the_pauses_grow_while_it_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 1.0)
    engines = [Stub(True), *(Stub(False) for _ in range(6))]
    assert await pauses_of(engines, [FOR_EVER], monkeypatch) == [1, 2, 4, 8, 8, 8, 8]


@asynchronous
async def test_an_engine_that_lived_long_is_replaced_without_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 1.0)
    engines = [Stub(True) for _ in range(5)]
    lives = [FOR_EVER, 1.0, 1.0, FOR_EVER, 1.0]
    assert await pauses_of(engines, lives, monkeypatch) == [1, 2, 4, 1, 2]
