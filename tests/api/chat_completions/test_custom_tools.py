"""Tools whose input is free text, in chat completions."""

from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from pydantic import ValidationError

from mlx_server.api.chat_completions.answer import ChatOutput
from mlx_server.api.chat_completions.input import ChatBody, to_request
from mlx_server.errors import BadRequest
from mlx_server.events import (
    Event,
    Finished,
    Started,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.requests import GenerateRequest, NamedTool
from tests.api.folding import body_of, chunks_of
from tests.api.strict import assert_strict

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "hi"}
F: Json = {"type": "function", "function": {"name": "f"}}
GRAMMAR: Json = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
PATCH: Json = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
CHOICE: Json = {"type": "custom", "custom": {"name": "patch"}}
CALLED: list[Event] = [
    ToolCallStarted(0, 0, "c0", "f"),
    ToolCallDelta(0, 0, '{"a": 1}'),
    ToolCallFinished(0, 0),
    ToolCallStarted(0, 1, "c1", "patch"),
    ToolCallDelta(0, 1, '{"input": "a'),
    ToolCallDelta(0, 1, '\\nb"}'),
    ToolCallFinished(0, 1),
]


def request(**asked: Any) -> GenerateRequest:
    return to_request(ChatBody.model_validate({"model": "m", "messages": [USER], **asked}))


def conversation(**asked: Any) -> Conversation:
    (found,) = request(**asked).prompts
    assert isinstance(found, Conversation)
    return found


def reported(events: Sequence[Event]) -> list[Event]:
    return [Started("m", 1), *events, Finished(0, "tool_calls", 1, 0)]


def output() -> ChatOutput:
    return ChatOutput(model="m", n=1, logprobs=False, include_usage=False, freeform={"patch"})


def deltas(events: Sequence[Event]) -> list[Json]:
    chunks = chunks_of(output(), reported(events))
    found = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
    return [call for calls in found if calls for call in calls]


def test_a_custom_tool_has_one_argument() -> None:
    f, patch = conversation(tools=[F, PATCH]).tools
    assert (f.name, patch.name) == ("f", "patch")
    assert list(patch.parameters["properties"]) == ["input"]
    with_grammar = {"type": "custom", "custom": {"name": "patch", "format": GRAMMAR}}
    assert "a+" in str(conversation(tools=[with_grammar]).tools[0].parameters)


def test_a_call_is_answered_as_text() -> None:
    body = body_of(output(), reported(CALLED))
    assert_strict(ChatCompletion, body)
    assert body["choices"][0]["message"]["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}},
    ]


def test_a_call_streams_as_text() -> None:
    assert deltas(CALLED)[2:] == [
        {"index": 1, "id": "c1", "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 1, "custom": {"input": "a"}},
        {"index": 1, "custom": {"input": "\nb"}},
    ]


def test_a_text_by_another_name_streams_too() -> None:
    events: list[Event] = [
        ToolCallStarted(0, 0, "c0", "patch"),
        ToolCallDelta(0, 0, '{"patch": "a"}'),
        ToolCallFinished(0, 0),
    ]
    assert deltas(events)[1:] == [{"index": 0, "custom": {"input": "a"}}]


def test_a_call_is_taken_back() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "a\n"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Done."}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    _, made, done = conversation(messages=turns, tools=[PATCH]).messages
    assert made.tool_calls == (ToolCall("c1", "patch", '{"input": "a\\n"}'),)
    assert done == Message("tool", "Done.", tool_call_id="c1")


def test_it_can_be_forced_and_allowed() -> None:
    assert request(tools=[F, PATCH], tool_choice=CHOICE).tool_choice == NamedTool("patch")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHOICE]}}
    found = conversation(tools=[F, PATCH], tool_choice=allowed)
    assert [tool.name for tool in found.tools] == ["patch"]


def test_one_name_is_one_tool() -> None:
    same = {"type": "custom", "custom": {"name": "f"}}
    with pytest.raises(BadRequest, match="'f'") as caught:
        request(tools=[F, same])
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "custom",
    [
        {},
        {"name": ""},
        {"name": 5},
        {"name": "p", "format": "text"},
        {"name": "p", "format": {"type": "json"}},
        {"name": "p", "format": {"type": "grammar"}},
        {"name": "p", "format": {"type": "grammar", "grammar": {"syntax": "ebnf"}}},
        {"name": "p", "format": {**GRAMMAR, "grammar": {"syntax": "lark", "definition": 1}}},
        {
            "name": "p",
            "format": {**GRAMMAR, "grammar": {"syntax": "lark", "definition": "x" * 10**6}},
        },
    ],
)
def test_what_is_no_custom_tool_is_refused(custom: Json) -> None:
    with pytest.raises(ValidationError):
        request(tools=[{"type": "custom", "custom": custom}])
