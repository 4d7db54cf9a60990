"""What the engine process says of its steps."""

from hashlib import sha256
from threading import Event, Thread
from time import process_time

import pytest

from mlx_server.engine.liveness import is_stuck_in_step
from mlx_server.engine.messages import Heartbeat
from mlx_server.system.process import thread_seconds
from mlx_server.worker.server_connection import HeartbeatMonitor


class Clocks:
    """What stands still while the machine sleeps, what does not, and those of two threads."""

    def __init__(self) -> None:
        self.monotonic, self.wall, self.threads = 100.0, 1e9, {1: 5.0, 2: 7.0}

    def pass_(self, seconds: float, *, share: float = 0.0) -> None:
        """share: of a processor that each of the threads gets."""
        self.monotonic += seconds
        self.wall += seconds
        self.threads = {thread: used + share * seconds for thread, used in self.threads.items()}

    def sleep(self, seconds: float) -> None:
        self.wall += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def heart(clocks: Clocks) -> HeartbeatMonitor:
    return HeartbeatMonitor(lambda: clocks.monotonic, lambda: clocks.wall, lambda: clocks.threads)


def step(heart: HeartbeatMonitor, clocks: Clocks, seconds: float) -> None:
    heart.step_begins(warm=True, doing="generating")
    clocks.pass_(seconds)
    heart.step_ends()


def beats_of(heart: HeartbeatMonitor, clocks: Clocks, seconds: int, share: float) -> Heartbeat:
    heart.step_begins(warm=True, doing="generating")
    for _ in range(2 * seconds):
        clocks.pass_(0.5, share=share)
        beat = heart.heartbeat()
    return beat


def test_a_long_step_is_reported_with_the_time_of_its_busiest_thread(
    heart: HeartbeatMonitor, clocks: Clocks
) -> None:
    """So a starved engine, whose threads get a quarter of a processor each, is told from one that
    loops for ever."""
    step(heart, clocks, 0.5)
    starved = beats_of(heart, clocks, 12, share=0.25)
    assert (starved.step_seconds, starved.longest_seconds, starved.doing) == (12, 0.5, "generating")
    assert starved.processor_seconds == pytest.approx(0.25 * 11)
    assert not is_stuck_in_step(starved, lambda: True)
    heart.step_ends()
    assert heart.heartbeat().step_seconds == 0
    assert is_stuck_in_step(beats_of(heart, clocks, 61, share=0.9), lambda: True)


def test_the_time_of_each_thread_is_its_own() -> None:
    """Two hash side by side, while this one waits."""
    done, before, began = Event(), thread_seconds(), process_time()

    def work() -> None:
        while not done.is_set():
            sha256(bytes(1 << 20))

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    while process_time() - began < 0.4:
        threads[0].join(0.01)
    after, total = thread_seconds(), process_time() - began
    done.set()
    busiest = max(used - before.get(thread, 0.0) for thread, used in after.items())
    assert 0.2 * total < busiest < 0.8 * total


def test_a_long_step_is_forgotten(heart: HeartbeatMonitor, clocks: Clocks) -> None:
    step(heart, clocks, 20.0)
    for _ in range(500):
        step(heart, clocks, 0.02)
    heart.step_begins(warm=True, doing="generating")
    assert 0.02 <= heart.heartbeat().longest_seconds < 1.0


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
