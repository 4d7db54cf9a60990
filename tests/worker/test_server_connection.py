"""What the engine process says of its steps."""

import queue
from concurrent.futures import Future

import pytest

from mlx_server.engine.messages import CancelRows, UnloadModel, encode_commands
from mlx_server.worker.server_connection import (
    END,
    REST_SECONDS,
    HeartbeatMonitor,
    Inbox,
    OwnInputs,
)


class Clocks:
    """What stands still while the machine sleeps, what does not, and the processor's."""

    def __init__(self) -> None:
        self.monotonic, self.wall, self.processor = 100.0, 1e9, 5.0

    def pass_(self, seconds: float, *, processor: float = 0.0) -> None:
        self.monotonic += seconds
        self.wall += seconds
        self.processor += processor

    def sleep(self, seconds: float) -> None:
        self.wall += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def heart(clocks: Clocks) -> HeartbeatMonitor:
    return HeartbeatMonitor(lambda: clocks.monotonic, lambda: clocks.wall, lambda: clocks.processor)


def step(heart: HeartbeatMonitor, clocks: Clocks, seconds: float) -> None:
    heart.step_begins(warm=True, doing="generating")
    clocks.pass_(seconds)
    heart.step_ends()


def test_a_step_is_told_with_its_time_and_the_processors(
    heart: HeartbeatMonitor, clocks: Clocks
) -> None:
    step(heart, clocks, 0.5)
    heart.step_begins(warm=True, doing="generating")
    clocks.pass_(2.0, processor=0.25)
    beat = heart.heartbeat()
    assert (beat.step_seconds, beat.longest_seconds, beat.processor_seconds) == (2.0, 0.5, 0.25)
    assert beat.doing == "generating"
    heart.step_ends()
    assert heart.heartbeat().step_seconds == 0


def test_a_step_that_is_the_first_of_its_kind_has_no_longest(
    heart: HeartbeatMonitor, clocks: Clocks
) -> None:
    step(heart, clocks, 0.5)
    heart.step_begins(warm=False, doing="loading x")
    assert heart.heartbeat().longest_seconds == 0


def test_a_long_step_is_forgotten(heart: HeartbeatMonitor, clocks: Clocks) -> None:
    step(heart, clocks, 20.0)
    for _ in range(500):
        step(heart, clocks, 0.02)
    heart.step_begins(warm=True, doing="generating")
    assert 0.02 <= heart.heartbeat().longest_seconds < 1.0


def test_a_step_after_a_rest_is_as_cold_as_a_first_one(
    heart: HeartbeatMonitor, clocks: Clocks
) -> None:
    step(heart, clocks, 0.5)
    clocks.pass_(REST_SECONDS - 1)
    heart.step_begins(warm=True, doing="generating")
    assert heart.heartbeat().longest_seconds
    heart.step_ends()
    clocks.pass_(REST_SECONDS + 1)
    heart.heartbeat()
    heart.step_begins(warm=True, doing="generating")
    assert heart.heartbeat().longest_seconds == 0


def test_a_step_in_which_the_machine_slept_begins_anew(
    heart: HeartbeatMonitor, clocks: Clocks
) -> None:
    step(heart, clocks, 0.5)
    heart.step_begins(warm=True, doing="generating")
    clocks.pass_(4.0)
    heart.heartbeat()
    clocks.sleep(3600.0)
    clocks.pass_(0.5)
    beat = heart.heartbeat()
    assert (beat.step_seconds, beat.longest_seconds) == (0.0, 0.0)
    clocks.pass_(6.0)
    beat = heart.heartbeat()
    assert (beat.step_seconds, beat.longest_seconds) == (6.0, 0.0)


def test_the_rest_while_the_machine_slept_counts(heart: HeartbeatMonitor, clocks: Clocks) -> None:
    step(heart, clocks, 0.5)
    clocks.sleep(3600.0)
    heart.heartbeat()
    heart.step_begins(warm=True, doing="generating")
    assert heart.heartbeat().longest_seconds == 0


def test_all_commands_that_have_come_are_taken_in_their_order() -> None:
    inbox: Inbox = queue.SimpleQueue()
    inputs = OwnInputs(inbox)
    inbox.put(encode_commands([CancelRows([1]), UnloadModel("m")]))
    inputs.wake()
    inbox.put(encode_commands([CancelRows([2])]))
    assert inputs.take(0) == [CancelRows([1]), UnloadModel("m"), CancelRows([2])]
    assert inputs.take(0) == []


@pytest.mark.parametrize("pause", [None, 60.0])
def test_a_task_that_has_finished_ends_the_waiting(pause: float | None) -> None:
    inputs = OwnInputs(queue.SimpleQueue())
    inputs.wake()
    assert inputs.take(pause) == []


def test_no_command_comes_within_the_pause() -> None:
    assert OwnInputs(queue.SimpleQueue()).take(0.001) == []


def test_when_the_server_is_gone_its_last_commands_are_not_carried_out() -> None:
    inbox: Inbox = queue.SimpleQueue()
    inbox.put(encode_commands([CancelRows([1])]))
    inbox.put(END)
    with pytest.raises(EOFError):
        OwnInputs(inbox).take(None)


def test_a_task_is_done_when_it_has_a_result() -> None:
    task: Future[int] = Future()
    inputs = OwnInputs(queue.SimpleQueue())
    assert not inputs.is_done(task)
    task.set_result(1)
    assert inputs.is_done(task)
