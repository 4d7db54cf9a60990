"""The phases of an answer: until its prompt is computed, and from its first token."""

import itertools

import pytest

from mlx_server.api.timing import Timing
from mlx_server.events import PromptProgress, Started, TextDelta

SECOND = 10**9


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at it is a second later."""
    ticks = itertools.count(0, SECOND)
    monkeypatch.setattr("mlx_server.api.timing.time.perf_counter_ns", lambda: next(ticks))


def timed() -> Timing:
    timing = Timing()
    for event in (
        Started("m", 7),
        PromptProgress(0, 7, 0, 3),
        TextDelta(0, "a"),
        TextDelta(0, "b"),
    ):
        timing.note(event)
    return timing


def test_the_first_token_ends_the_prompt() -> None:
    found = timed().durations(7, 2)
    assert found == {
        "total_duration": 3 * SECOND,
        "load_duration": SECOND,
        "prompt_eval_count": 7,
        "prompt_eval_duration": SECOND,
        "eval_count": 2,
        "eval_duration": SECOND,
    }


def test_speeds_are_of_what_was_computed() -> None:
    found = timed().timings(7, 3, 2)
    assert (found["cache_n"], found["prompt_n"], found["prompt_per_second"]) == (3, 4, 4.0)
    assert (found["predicted_n"], found["predicted_per_token_ms"]) == (2, 500.0)


def test_what_took_no_token_has_no_speed() -> None:
    found = timed().timings(3, 7, 0)
    assert (found["prompt_n"], found["predicted_per_token_ms"]) == (0, 0.0)
