"""The engine's process: how it starts, and that it never outlives its server."""

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from mlx_server.engine import client, engine_process, messages
from mlx_server.engine.client import EngineClient
from mlx_server.engine.engine_process import fast_blas
from mlx_server.engine.messages import LoadModel
from mlx_server.engine.worker_arguments import (
    RankGroup,
    RankHost,
    WorkerArguments,
    encode_arguments,
)
from mlx_server.errors import EngineDied, ShuttingDown
from mlx_server.system import descriptors
from tests.engine.clients import (
    ENDLESS,
    HANG,
    answered,
    ask,
    asynchronous,
    first_token,
    freeze,
    ignored,
    running,
    until_it_fails,
)

pytestmark = pytest.mark.slow


@asynchronous
async def test_an_engine_that_does_not_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = shutil.which("false")
    assert nothing
    monkeypatch.setattr(sys, "executable", nothing)
    engine = EngineClient()
    with pytest.raises(EngineDied):
        await engine.start()
    assert not engine.alive
    await engine.stop()


@asynchronous
async def test_a_start_given_up_leaves_an_engine_that_works(tiny_path: Path) -> None:
    engine = EngineClient()
    starting = asyncio.create_task(engine.start())
    while not engine.alive:  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(0)
    starting.cancel()
    try:
        await engine.load(LoadModel("tiny", str(tiny_path)), ignored)
        assert len((await answered(engine, ask()))[0]) == 5
    finally:
        await engine.stop()


@asynchronous
async def test_stop_ends_the_process_and_what_waits(
    tiny_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(tiny_path) as engine:
        assert engine.pid
        process = psutil.Process(engine.pid)
        async with engine.generate([ask(ENDLESS)]) as feed:
            await first_token(feed)
            request = asyncio.create_task(until_it_fails(engine, ask(ENDLESS)))
            load = asyncio.create_task(engine.load(LoadModel("second", str(tiny_path)), ignored))
            await asyncio.sleep(0)  # they have asked
            await engine.stop(ShuttingDown("going"))
        assert not process.is_running()
        for task in (request, load):
            with pytest.raises(ShuttingDown):
                await task
        assert not engine.alive
        await engine.stop()
        await asyncio.gather(engine.stop(), engine.stop())
    assert capfd.readouterr().err == ""


@asynchronous
async def test_stop_ends_a_process_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "STOP_SECONDS", 0.1)
    async with running() as engine:
        process = psutil.Process(freeze(engine))
        await engine.stop()
        assert not process.is_running()


@asynchronous
async def test_a_process_that_runs_already_becomes_the_engine(tiny_path: Path) -> None:
    before = {*psutil.Process().children()}
    early = engine_process.EngineProcess()
    engine = EngineClient(WorkerArguments(concurrency=4), early=early)
    await engine.start()
    try:
        assert engine.pid == early.pid
        await engine.load(LoadModel("tiny", str(tiny_path)), ignored)
        assert len((await answered(engine, ask()))[0]) == 5
        begun = {*psutil.Process().children()} - before
        assert len(begun) == 2, "the engine and its lifeline"
    finally:
        await engine.stop()
    assert not psutil.pid_exists(early.pid)


@asynchronous
async def test_an_engine_starts_while_a_thousand_files_are_open() -> None:
    """As one does that replaces a lost one, while many clients are connected."""
    if descriptors.raise_soft_limit() < 2048:
        pytest.skip("this process may not open so many files")
    with ExitStack() as files:
        for _ in range(1024):
            files.callback(os.close, os.dup(1))
        async with running() as engine:
            assert engine.alive


@asynchronous
async def test_an_interrupt_is_not_for_the_engine(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        assert engine.pid
        assert os.getpgid(engine.pid) != os.getpgid(0)  # a terminal's Ctrl-C goes to a group
        os.kill(engine.pid, signal.SIGINT)
        assert len((await answered(engine, ask()))[0]) == 5


@pytest.mark.parametrize("preloaded", [None, "libm.so.6"])
@asynchronous
async def test_the_engine_gets_the_fast_blas(
    preloaded: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (blas := fast_blas()):
        pytest.skip("no faster BLAS here")
    if preloaded:
        monkeypatch.setenv("LD_PRELOAD", preloaded)
    else:
        monkeypatch.delenv("LD_PRELOAD", raising=False)
    async with running() as engine:
        environment = psutil.Process(engine.pid).environ()
    assert environment["LD_PRELOAD"] == (f"{preloaded}:{blas}" if preloaded else blas)


def test_an_engine_that_never_says_a_word_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = tmp_path / "python"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(mute))
    monkeypatch.setattr("mlx_server.engine.engine_process.fast_blas", lambda: None)
    monkeypatch.setattr(client, "START_SECONDS", 0.2)

    async def start() -> EngineClient:
        engine = EngineClient()
        with pytest.raises(EngineDied, match="was not ready"):
            await engine.start()
        await engine.stop()
        return engine

    engine = asyncio.run(asyncio.wait_for(start(), HANG))
    assert engine.pid is not None
    assert not psutil.pid_exists(engine.pid)


HOSTS = (
    RankHost("one.local", ("10.0.0.1", "10.0.1.1"), (None, "rdma_en2")),
    RankHost("two.local", ("10.0.0.2",), ("rdma_en3", None)),
)


def test_jaccl_is_told_the_devices_and_where_rank_0_is() -> None:
    group = RankGroup("pipeline", HOSTS, port=5000, backend="jaccl-ring")
    devices = json.loads(group.backend_files()["MLX_IBV_DEVICES"])
    assert devices == [[None, "rdma_en2"], ["rdma_en3", None]]
    assert group.backend_variables() == {
        "MLX_JACCL_COORDINATOR": "10.0.0.1:5000",
        "MLX_JACCL_RING": "1",
    }


@pytest.mark.parametrize("sent", [messages.frame(encode_arguments(WorkerArguments())), b""])
def test_a_server_gone_before_the_engine_is_ready_is_no_error(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", engine_process.MODULE, str(theirs.fileno())]
    ours.sendall(sent)
    ours.close()
    with theirs:
        run = subprocess.run(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, timeout=HANG
        )
    assert (run.returncode, run.stderr) == (0, b"")


def test_the_engine_goes_when_its_server_left_reports_unread() -> None:
    """A socket closed with something unread in it ends the other side's reading with an error."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", engine_process.MODULE, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker:
        theirs.close()
        ours.sendall(messages.frame(encode_arguments(WorkerArguments(concurrency=4))))
        ours.settimeout(HANG)
        with ours.makefile("rb") as ready:
            ready.read(messages.length(ready.read(messages.HEADER_BYTES)))
        ours.sendall(messages.frame(messages.encode_commands([LoadModel("lost", "/nowhere")])))
        assert select.select([ours], [], [], HANG)[0]
        ours.close()
        try:
            worker.wait(HANG)
        finally:
            worker.kill()
