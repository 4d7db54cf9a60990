"""Slow, asleep, starved, stopped or dead: what the server takes an engine process for."""

import pytest

from mlx_server.engine.liveness import (
    FIRST_STEP_SECONDS,
    IMPORT_SECONDS,
    LOOK_SECONDS,
    SILENT_SECONDS,
    STALLED_SECONDS,
    Liveness,
    Vitals,
    is_stuck_in_step,
)
from mlx_server.engine.messages import IMPORTING, Heartbeat

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
) -> tuple[float, str] | None:
    """After how many silent seconds, and why. share: of a processor that it uses meanwhile."""
    liveness = Liveness()
    if heard:
        liveness.record(heard)
    at = 0.0
    while at < seconds:
        at += step
        seen = Vitals(
            "stopped" if stopped else "running", (share + pages) * at, share * at, runnable
        )
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
    for heard in (WARM, COLD):
        found = given_up(heard, share=waiting_for_the_gil)
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


@pytest.mark.parametrize(
    "healthy",
    [
        {"share": 0.1},  # at load 10 on two cores
        {"runnable": True},  # no time at all
        {"pages": 500.0},  # pages come back from the disk
    ],
)
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


@pytest.mark.parametrize(
    ("step", "longest", "processor", "runnable", "stuck"),
    [
        (4.9, 0.1, 0.0, False, False),
        (5.1, 0.1, 0.0, False, True),  # waits for a GPU or a lock
        (5.1, 0.1, 5.0, True, True),  # loops for ever
        (5.1, 0.1, 1.0, False, False),  # gets a fifth of a core
        (5.1, 0.1, 0.25, True, False),  # gets a twentieth, at load 40 on two cores
        (59.0, 0.1, 3.0, True, False),
        (61.0, 0.1, 3.0, True, True),
        (59.0, 0.1, 12.0, False, False),
        (61.0, 0.1, 12.0, False, True),
        (5.1, 2.0, 0.0, False, False),  # a machine that needs as long as that
        (10.1, 2.0, 0.0, False, True),
        (59.0, 0.0, 59.0, False, False),  # its first step
        (61.0, 0.0, 0.0, False, True),
    ],
)
def test_a_step(step: float, longest: float, processor: float, runnable: bool, stuck: bool) -> None:
    assert is_stuck_in_step(Heartbeat(step, longest, processor), lambda: runnable) == stuck
