"""What the system says of a process: its time, and whether it waits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlx_server.engine.liveness import Vitals, vitals
from tests.live.server import eventually


@contextmanager
def program(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-ISc", code], stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


LOOPS = "print(flush=True)\nwhile True: pass"
SLEEPS = "print(flush=True)\nimport time\ntime.sleep(1000)"
ANOTHER_LOOPS = (
    "import threading\ndef loop():\n  while True: pass\n"
    "threading.Thread(target=loop, daemon=True).start()\n"
    "print(flush=True)\nthreading.Event().wait()"
)


def seen(pid: int) -> Vitals:
    found = vitals(pid)
    assert found
    return found


@pytest.mark.parametrize("code", [LOOPS, ANOTHER_LOOPS])
def test_the_vitals_of_a_process_that_works(code: str) -> None:
    with program(code) as pid:
        before = seen(pid)
        eventually(lambda: seen(pid).work > before.work, "it works")
        eventually(lambda: seen(pid).runnable or sys.platform != "linux", "it wants to")
        assert seen(pid).state == "running"


def test_the_vitals_of_a_process_that_sleeps_or_was_stopped() -> None:
    with program(SLEEPS) as pid:
        eventually(lambda: not seen(pid).runnable, "it sleeps")
        before = seen(pid)
        time.sleep(0.05)
        assert seen(pid) == before
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: seen(pid).state == "stopped", "it is stopped")
    assert vitals(pid) is None


@pytest.mark.parametrize("where", ["psutil.Process", "pathlib.Path.glob"])
def test_without_a_free_descriptor_nothing_is_judged(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next look may tell more."""

    def refuse(*args: object) -> None:
        raise OSError(24, "Too many open files")

    if where == "psutil.Process" or sys.platform == "linux":
        monkeypatch.setattr(where, refuse)
        assert vitals(os.getpid()) is None
