"""The phases of an answer: until its prompt is computed, and from its first token."""

import pytest

from mlx_server.api.accumulator import Timing
from mlx_server.events import PromptProgress, Started, TextDelta

SECOND = 10**9


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timing:
    """Of an answer with an event each second, and the time at which the last one came."""
    seconds = 0
    monkeypatch.setattr("mlx_server.api.accumulator.time.perf_counter_ns", lambda: seconds * SECOND)
    timing = Timing()
    for event in (
        Started("m", 7),
        PromptProgress(0, 7, 0, 3),
        PromptProgress(0, 7, 0, 7),
        TextDelta(0, "a"),
        TextDelta(0, "b"),
        TextDelta(0, "c"),
    ):
        seconds += 1
        timing.note(event)
    return timing


def test_the_first_token_ends_the_prompt(timed: Timing) -> None:
    assert timed.durations(7, 3) == {
        "total_duration": 6 * SECOND,
        "load_duration": SECOND,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 3 * SECOND,
        "eval_count": 3,
        "eval_duration": 2 * SECOND,
    }


def test_speeds_are_of_what_was_computed(timed: Timing) -> None:
    found = timed.timings(10, 4, 4)
    assert (found["cache_n"], found["prompt_n"], found["prompt_per_second"]) == (4, 6, 2.0)
    assert (found["predicted_n"], found["predicted_per_token_ms"]) == (4, 500.0)


def test_what_took_no_token_has_no_speed(timed: Timing) -> None:
    found = timed.timings(3, 7, 0)
    assert (found["prompt_n"], found["predicted_per_token_ms"]) == (0, 0.0)
