"""A shell that kills a process group once the one who holds its pipe is gone."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from mlx_server.engine import engine_process
from mlx_server.engine.engine_process import Lifeline
from tests.live.server import eventually

SLEEPS = """
import os, time
if child := os.fork():
    print(child, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def group() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child, in a group of their own."""
    command = [sys.executable, "-ISc", SLEEPS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def child_of(group: subprocess.Popen[bytes]) -> psutil.Process:
    assert group.stdout
    return psutil.Process(int(group.stdout.readline()))


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def guard_of(line: Lifeline) -> psutil.Process:
    return psutil.Process(line._guard.pid)


def test_it_kills_the_group_when_the_pipe_closes_even_if_the_group_is_stopped(
    group: subprocess.Popen[bytes],
) -> None:
    child = child_of(group)

    async def lose() -> None:
        os.kill(group.pid, signal.SIGSTOP)
        line = await Lifeline.start(group.pid)
        assert group.poll() is None
        assert line._guard.stdin
        line._guard.stdin.close()  # as the system does when the server is killed
        await line._guard.wait()

    asyncio.run(lose())
    assert group.wait(10) == -signal.SIGKILL
    eventually(lambda: is_gone(child), "what the engine has started is gone too")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_shell_that_was_killed_or_stopped_is_released_too(
    group: subprocess.Popen[bytes], blow: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "RELEASE_SECONDS", 0.05)

    async def release() -> None:
        line = await Lifeline.start(group.pid)
        guard = guard_of(line)
        guard.send_signal(blow)
        if blow == signal.SIGKILL:
            await line._guard.wait()
        else:
            eventually(lambda: guard.status() == psutil.STATUS_STOPPED, "it is stopped")
        await asyncio.wait_for(line.release(), 10)
        assert not guard.is_running()

    asyncio.run(release())
    assert group.poll() is None, "nothing has happened to the engine"


def test_an_interrupt_from_the_terminal_is_not_for_it_and_it_is_told_nothing(
    group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "secret")

    async def look() -> None:
        line = await Lifeline.start(group.pid)
        try:
            assert os.getpgid(line._guard.pid) != os.getpgid(0)
            assert "secret" not in guard_of(line).environ().values()
        finally:
            await line.release()

    asyncio.run(look())
