"""Events add up to answers, their usage and what the server has to say of them."""

from mlx_server.api.accumulator import Accumulator, prompt_logprobs_body
from mlx_server.events import (
    Answer,
    Event,
    Finished,
    PromptScored,
    ReasoningDelta,
    Repaired,
    Started,
    TextDelta,
    TokenLogprob,
    TokensSoFar,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
)


def accumulated(*events: Event, prompts: int = 1, n: int = 1) -> Accumulator:
    found = Accumulator(model="asked", prompts=prompts, n=n)
    for event in events:
        found.add(event)
    return found


def test_each_answer_has_its_own_parts() -> None:
    found = accumulated(
        Started("m", 7),
        ReasoningDelta(1, "So."),
        TextDelta(0, "Ye"),
        TextDelta(1, "No"),
        TextDelta(0, "s"),
        Finished(0, "stop", 2, 0),
        Finished(1, "length", 3, 0),
        n=2,
    )
    first, second = found.answers
    assert ("".join(first.texts), first.reasoning, first.finish_reason) == ("Yes", [], "stop")
    assert (second.texts, second.reasoning, second.finish_reason) == (["No"], ["So."], "length")
    assert found.model == "m"


def test_a_call_is_one_when_it_is_complete() -> None:
    answer = Answer()
    for event in (
        ToolCallStarted(0, 0, "a", "f"),
        ToolCallDelta(0, 0, '{"x"'),
        ToolCallStarted(0, 1, "b", "g"),
        ToolCallDelta(0, 1, '{"y'),
        ToolCallDelta(0, 0, ": 1}"),
        ToolCallFinished(0, 0),
        Finished(0, "length", 9, 0),
    ):
        answer.add(event)
    assert [(call.id, call.name, call.arguments) for call in answer.calls] == [
        ("a", "f", '{"x": 1}')
    ]


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


def test_token_ids_are_reported_once() -> None:
    found = accumulated(*(TokensSoFar(0, token, 0, 0, token) for token in (5, 6)))
    assert found.new_token_ids(0) == [5, 6]
    found.add(TokensSoFar(0, 3, 0, 0, 7))
    assert (found.new_token_ids(0), found.new_token_ids(0)) == ([7], [])
    assert found.answers[0].token_ids == [5, 6, 7]


def test_there_are_warnings_only_of_what_happened() -> None:
    found = accumulated(
        Started("m", 1, unenforced=("$.a",)), Repaired(0, "json", "content"), Violation(0, "$: no")
    )
    assert found.warnings(*found.answers) == {
        "mlx_server": {
            "repairs": [{"index": 0, "what": "json", "where": "content"}],
            "unenforced": ["$.a"],
            "unmet": [{"index": 0, "what": "$: no"}],
        }
    }
    nothing = accumulated(Started("m", 1), TextDelta(0, "a"))
    assert nothing.warnings(*nothing.answers) == {}


def test_tokens_of_a_prompt_are_ranked_among_their_alternatives() -> None:
    answer = Answer()
    assert prompt_logprobs_body(answer) == {}
    likely = TokenLogprob("b", b"b", -0.1, id=2)
    tokens = (
        TokenLogprob("a", b"a", None, id=1),
        TokenLogprob("c", b"c", -2.0, (likely,), id=3),
    )
    answer.add(PromptScored(0, tokens))
    assert prompt_logprobs_body(answer)["prompt_logprobs"] == [
        None,
        {
            "3": {"logprob": -2.0, "rank": None, "decoded_token": "c"},
            "2": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
        },
    ]
