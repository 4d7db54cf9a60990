"""A Mac stays awake while rows are under way; shown with a command that is no caffeinate."""

import asyncio
import sys

import psutil
import pytest

from mlx_server.system import keep_awake
from mlx_server.system.keep_awake import KeepAwake, keep_awake_command

SLEEPS = (sys.executable, "-ISc", "import time; time.sleep(1000)")


def test_the_command_is_of_a_mac_only() -> None:
    assert keep_awake_command("linux") == ()
    command = keep_awake_command("darwin")
    assert command[:3] == ("/usr/bin/caffeinate", "-i", "-w")
    assert int(command[3]) == psutil.Process().pid


def test_one_process_for_many_rows_and_none_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_awake, "LINGER_SECONDS", 0.05)

    async def run() -> None:
        keeper = KeepAwake(SLEEPS)
        keeper.count(1)
        first = keeper._process
        assert first
        keeper.count(0)
        keeper.count(3)  # the next request, before it is idle for long
        await asyncio.sleep(0.2)
        assert keeper._process is first
        assert first.poll() is None
        keeper.count(0)
        while keeper._process:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
        assert first.returncode is not None
        keeper.count(1)
        second = keeper._process
        assert second
        keeper.stop()
        assert second.returncode is not None

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_command_that_is_missing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        keeper = KeepAwake(["/nowhere/caffeinate"])
        for rows in (1, 0, 1, 0):
            keeper.count(rows)
        keeper.stop()

    asyncio.run(run())
    assert caplog.text.count("can't be kept awake") == 1
