"""Slow, asleep, starved, stopped or dead: what the server takes an engine process for."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest

from mlx_server.engine.liveness import (
    FIRST_STEP_SECONDS,
    IMPORT_SECONDS,
    LONG_SECONDS,
    LOOK_SECONDS,
    SILENT_SECONDS,
    STALLED_SECONDS,
    EngineActivity,
    Liveness,
    State,
    Vitals,
    is_stuck_in_step,
    vitals,
)
from mlx_server.engine.messages import IMPORTING, Heartbeat
from tests.live.server import eventually
from tests.tables import cases

WARM = Heartbeat(0.1, 0.1, doing="generating")
COLD = Heartbeat(0.1, 0.0, doing="compiling a grammar")
LATEST = FIRST_STEP_SECONDS + 1


def given_up(
    heard: Heartbeat | None,
    *,
    share: float = 0.0,
    pages: float = 0.0,
    runnable: bool = False,
    stopped: bool = False,
    seconds: float = LATEST,
    step: float = LOOK_SECONDS,
    threads: int = 0,
) -> tuple[float, str] | None:
    """After how many silent seconds, and why. share: of a processor that it uses meanwhile.
    threads: how many use it, if that is known."""
    liveness = Liveness()
    if heard:
        liveness.record(heard)
    at = 0.0
    while at < seconds:
        at += step
        each = {str(thread): share * at / threads for thread in range(threads)}
        state: State = "stopped" if stopped else "running"
        seen = Vitals(state, (share + pages) * at, share * at, runnable, each)
        if why := liveness.look(step, seen):
            return at, why
    return None


def test_a_stopped_process_is_noticed_at_once_whatever_it_was_doing() -> None:
    for heard in (None, WARM, COLD, Heartbeat(0.0, 0.0, doing=IMPORTING)):
        found = given_up(heard, stopped=True)
        assert found
        assert found[1] == "was stopped"
        assert SILENT_SECONDS <= found[0] < SILENT_SECONDS + 2 * LOOK_SECONDS


def test_a_deadlock_uses_no_processor_and_is_noticed_at_once() -> None:
    waiting_for_the_gil = 0.03
    for heard, threads in product((WARM, COLD), (0, 4)):
        found = given_up(heard, share=waiting_for_the_gil * max(1, threads), threads=threads)
        assert found
        assert found[1] == "stopped answering"
        assert found[0] < SILENT_SECONDS + 2 * LOOK_SECONDS


def test_an_import_that_waits_for_the_system_has_more_time() -> None:
    found = given_up(Heartbeat(0.0, 0.0, doing=IMPORTING))
    assert found
    assert IMPORT_SECONDS <= found[0] < IMPORT_SECONDS + 2 * LOOK_SECONDS


def test_an_interpreter_that_starts_is_left_to_the_limit_of_a_start() -> None:
    assert given_up(None) is None


def test_a_loop_for_ever_that_keeps_the_gil_is_noticed_by_its_processor_time() -> None:
    found = given_up(WARM, share=1.0)
    assert found
    assert found[1] == "is stuck"
    assert STALLED_SECONDS <= found[0] < STALLED_SECONDS + 3 * LOOK_SECONDS
    cold = given_up(COLD, share=1.0)
    assert cold
    assert cold[0] >= FIRST_STEP_SECONDS


@cases
def test_a_starved_process_is_not_taken_for_a_dead_one(healthy: dict[str, float]) -> None:
    found = given_up(WARM, **healthy)  # type: ignore[arg-type]
    assert found
    assert found[0] > 5 * SILENT_SECONDS  # but not for ever


def test_what_the_server_slept_through_is_not_counted() -> None:
    """Neither a laptop's sleep nor a server that was given no time."""
    liveness = Liveness()
    liveness.record(WARM)
    assert liveness.look(8 * 3600.0, Vitals("running", 1.0, 1.0, False)) is None
    assert liveness.silent <= 2 * LOOK_SECONDS


def test_a_word_begins_it_anew() -> None:
    liveness = Liveness()
    for _ in range(100):
        assert liveness.look(LOOK_SECONDS, Vitals("stopped", 1.0, 1.0, False)) is None
        liveness.record()


@cases
def test_a_step(step: float, longest: float, processor: float, runnable: bool, stuck: bool) -> None:
    assert is_stuck_in_step(Heartbeat(step, longest, processor), lambda: runnable) == stuck


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


def test_what_takes_long_is_told_once_and_when_it_is_over() -> None:
    doing = EngineActivity()
    what = "reading the vocabulary of gpt-oss"
    assert doing.report(what, 10.0) is None
    assert doing.report(what, 10.0 + LONG_SECONDS - 0.1) is None
    reported = doing.report(what, 10.0 + LONG_SECONDS)
    assert reported
    assert what in reported
    assert doing.report(what, 20.0) is None
    assert doing.seconds(20.0) == 10.0
    assert doing.report("compiling a grammar", 21.0) == f"{what} took 11.0 s"
    assert doing.report("generating", 21.5) is None
