"""Models that have rows get the same time, and idle time is not made up for."""

from mlx_server.worker.loaded_models import StepTime


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def stepped(times: StepTime, clock: Clock, model: str, seconds: float) -> None:
    with times.step(model):
        clock.now += seconds


def test_the_model_with_the_least_time_is_next() -> None:
    clock = Clock()
    times = StepTime(clock)
    times.add("slow")
    times.add("fast")
    stepped(times, clock, "slow", 1.0)
    stepped(times, clock, "fast", 0.1)
    assert times.next(["slow", "fast"]) == "fast"
    assert times.next(["slow"]) == "slow"
    assert times.next([]) is None


def test_a_model_that_was_idle_does_not_catch_up() -> None:
    clock = Clock()
    times = StepTime(clock)
    times.add("busy")
    times.add("idle")
    for _ in range(5):
        stepped(times, clock, "busy", 1.0)
    times.resume("idle")
    stepped(times, clock, "idle", 2.0)
    assert times.next(["busy", "idle"]) == "busy"


def test_a_step_that_fails_counts_too() -> None:
    clock = Clock()
    times = StepTime(clock)
    times.add("failing")
    times.add("other")
    try:
        with times.step("failing"):
            clock.now += 1.0
            raise MemoryError
    except MemoryError:
        pass
    assert times.next(["failing", "other"]) == "other"
