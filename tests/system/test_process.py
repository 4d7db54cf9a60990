"""The class of scheduling in which MLX's threads take half the time, and a Mac that stays awake
while rows are under way; shown with a command that is no caffeinate.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from mlx_server.system import keep_awake
from mlx_server.system.keep_awake import KeepAwake, keep_awake_command
from mlx_server.system.process import MAPPED_BYTES, keep_time_slices

if sys.platform == "linux":

    @pytest.fixture
    def _as_by_default() -> Iterator[None]:
        policy = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        yield
        os.sched_setscheduler(0, policy, os.sched_param(0))

    @pytest.mark.usefixtures("_as_by_default")
    def test_a_thread_keeps_its_time_slice() -> None:
        keep_time_slices()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    @pytest.mark.usefixtures("_as_by_default")
    def test_real_time_priority_stays() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            pytest.skip("this user may not have it")
        keep_time_slices()
        assert os.sched_getscheduler(0) == os.SCHED_RR

    @pytest.mark.usefixtures("_as_by_default")
    def test_a_sandbox_may_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(*_: object) -> None:
            raise PermissionError

        with monkeypatch.context() as patches:
            patches.setattr(os, "sched_setscheduler", forbidden)
            keep_time_slices()
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


PROGRAM = f"""
from mlx_server.system.process import return_large_blocks

return_large_blocks()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

for size in range(2, 31):  # each one that is freed raises the threshold for those after it
    block = bytearray(size * {MAPPED_BYTES})
    del block
before = resident()
small, large = [], []
for _ in range(16):
    large.append(bytearray(b"x" * (2 * {MAPPED_BYTES})))
    small.append(bytearray(b"x" * (100 << 10)))  # it stays, and lies above the large one
del large
print((resident() - before) // {MAPPED_BYTES})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other allocators have no such option")
def test_large_blocks_are_returned_as_soon_as_they_are_freed() -> None:
    """Of 32 MiB; by default glibc would keep them between the small ones."""
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, env=own)
    assert int(run.stdout) <= 4


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
