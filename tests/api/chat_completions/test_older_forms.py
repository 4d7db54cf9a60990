"""Messages and fields of earlier APIs: `functions`, `function_call`, and results of other roles."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from pydantic import ValidationError

from mlx_server.api.chat_completions.answer import ChatOutput, FunctionCallOutput
from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.events import (
    Event,
    Finished,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.messages import ToolCall
from mlx_server.requests import NamedTool, SamplingParams
from tests.api import wire
from tests.api.chat_completions.asking import FUNCTION, TOOL, USER, asked, calling, messages
from tests.api.folding import body_of, chunks_of
from tests.api.wire import Json

pytestmark = pytest.mark.usefixtures("_as_before")


@pytest.mark.parametrize("role", ["function", "ipython"])
def test_a_result_answers_the_call_of_its_name(role: str) -> None:
    results = [{"role": role, "name": name, "content": name.upper()} for name in "bca"]
    _, *found = messages(calling("a", "b", "a"), *results)
    assert [(m.role, m.tool_call_id, m.content) for m in found] == [
        ("tool", "id_1", "B"),
        ("tool", None, "C"),
        ("tool", "id_0", "A"),
    ]


def test_results_without_a_name_answer_the_calls_in_turn() -> None:
    results: list[Json] = [{"role": "ipython", "content": str(i)} for i in range(3)]
    _, *found = messages(calling("a", "b"), *results)
    assert [m.tool_call_id for m in found] == ["id_0", "id_1", None]


def test_results_of_both_kinds_in_one_turn() -> None:
    tool = {"role": "tool", "tool_call_id": "id_0", "content": "x"}
    _, _, last = messages(calling("a", "a"), tool, {"role": "function", "name": "a", "content": ""})
    assert last.tool_call_id == "id_1"


def test_a_function_call_is_a_call_and_its_id_stays_the_same() -> None:
    called = {
        "role": "assistant",
        "content": "So.",
        "function_call": {"name": "f", "arguments": ""},
    }
    result = {"role": "function", "name": "f", "content": "x"}
    first, answer, *later = messages(called, result, called, result)
    (call,) = first.tool_calls
    assert (call.name, call.arguments, first.content) == ("f", "", "So.")
    assert answer.tool_call_id == call.id != later[1].tool_call_id == later[0].tool_calls[0].id
    assert messages(called, result) == (first, answer)


def test_a_message_has_calls_in_one_form() -> None:
    both = {**calling("a"), "function_call": {"name": "f", "arguments": "{}"}}
    assert messages(both) == messages(calling("a"))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [(None, "auto"), ("auto", "auto"), ("none", "none"), ({"name": "f"}, NamedTool("f"))],
)
def test_functions_are_tools_of_which_one_is_called(choice: Any, expected: Any) -> None:
    request, conversation = asked(functions=[FUNCTION], function_call=choice)
    assert (request.tool_choice, request.parallel_calls) == (expected, False)
    assert conversation.tools == asked(tools=[TOOL])[1].tools


@pytest.mark.parametrize(
    "given",
    [
        {"functions": [FUNCTION] * 129},
        {"functions": FUNCTION},
        {"functions": [TOOL]},
        {"function_call": "required"},
        {"function_call": {"name": ""}},
        {"functions": [{"name": 1}]},
        {"continue_final_message": "yes"},
        {"add_generation_prompt": 0},
    ],
)
def test_wrong_types_are_refused(given: Json) -> None:
    with pytest.raises(ValidationError):
        ChatBody.model_validate({"model": wire.MODEL, "messages": [USER], **given})


CALL = ToolCall("c1", "f", '{"a": 1}')


EVENTS: tuple[Event, ...] = (
    Started(wire.MODEL, 3, (), None, (), SamplingParams(), ()),
    TextDelta(0, "So."),
    ToolCallStarted(0, 0, CALL.id, CALL.name),
    ToolCallDelta(0, 0, '{"a":'),
    ToolCallDelta(0, 0, " 1}"),
    ToolCallFinished(0, 0),
    Finished(0, "tool_calls", completion_tokens=5, cached_tokens=0),
)


def output() -> ChatOutput:
    return FunctionCallOutput(model=wire.MODEL, n=1, logprobs=False, include_usage=False)


def test_the_answer_has_the_older_form_too() -> None:
    body = body_of(output(), EVENTS)
    completion = ChatCompletion.model_validate(json.loads(json.dumps(body)))
    (choice,) = completion.choices
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call
    assert choice.message.function_call.model_dump() == {"name": "f", "arguments": '{"a": 1}'}
    assert choice.message.tool_calls is None


def test_streamed_and_not_it_is_the_same() -> None:
    chunks = chunks_of(output(), EVENTS)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert pieces[0] == {"name": "f", "arguments": ""}
    assert "".join(piece["arguments"] for piece in pieces) == CALL.arguments
    assert all("tool_calls" not in delta for delta in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
