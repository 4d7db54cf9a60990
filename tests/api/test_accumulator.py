"""Events add up to answers, their usage and what the server has to say of them."""

from mlx_server.api.accumulator import Accumulator
from mlx_server.events import (
    Event,
    Finished,
    Started,
)


def accumulated(*events: Event, prompts: int = 1, n: int = 1) -> Accumulator:
    found = Accumulator(model="asked", prompts=prompts, n=n)
    for event in events:
        found.add(event)
    return found


def test_a_prompt_and_what_is_cached_of_it_count_once_for_its_answers() -> None:
    ends = (
        Finished(i, "stop", 10, cached, reasoning_tokens=1) for i, cached in enumerate((3, 4, 5, 6))
    )
    usage = accumulated(Started("m", 20, tool_output_tokens=2), *ends, prompts=2, n=2).usage()
    assert usage == {
        "prompt_tokens": 20,
        "completion_tokens": 40,
        "total_tokens": 60,
        "prompt_tokens_details": {"cached_tokens": 3 + 5, "tool_output_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }


def test_further_prompts_of_an_answer_count_too() -> None:
    end = Finished(0, "stop", 5, 0, further_prompt_tokens=30)
    assert accumulated(Started("m", 20), end).usage()["prompt_tokens"] == 50
