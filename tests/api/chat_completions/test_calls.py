"""Calls in an answer: of tools whose input is free text, and for clients that know `functions`."""

from collections.abc import Sequence
from typing import Any

from openai.types.chat import ChatCompletion

from mlx_server.api.chat_completions.answer import ChatOutput
from mlx_server.events import (
    Event,
    Finished,
    Started,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from tests.api.folding import body_of, chunks_of
from tests.api.strict import assert_strict


def call(number: int, name: str, *arguments: str) -> list[Event]:
    pieces = [ToolCallDelta(0, number, each) for each in arguments]
    return [ToolCallStarted(0, number, f"c{number}", name), *pieces, ToolCallFinished(0, number)]


def whole(*events: Event) -> list[Event]:
    end = Finished(0, "tool_calls", TokenCounts(1))
    return [Started("m", 1), TextDelta(0, "So."), *events, end]


def freeform() -> ChatOutput:
    return ChatOutput("m", 1, freeform={"patch"})


def deltas(output: ChatOutput, events: Sequence[Event], name: str) -> list[Any]:
    chunks = chunks_of(output, whole(*events))
    found = [chunk["choices"][0]["delta"].get(name) for chunk in chunks]
    return [piece for piece in found if piece]


CALLED = [*call(0, "f", '{"a": 1}'), *call(1, "patch", '{"input": "a', '\\nb"}')]


def test_the_input_of_a_custom_tool_is_text() -> None:
    body = body_of(freeform(), whole(*CALLED))
    assert_strict(ChatCompletion, body)
    assert body["choices"][0]["message"]["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}},
    ]
    streamed = deltas(freeform(), CALLED, "tool_calls")
    assert [piece for (piece,) in streamed][2:] == [
        {"index": 1, "id": "c1", "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 1, "custom": {"input": "a"}},
        {"index": 1, "custom": {"input": "\nb"}},
    ]


def test_a_text_by_another_name_streams_too() -> None:
    streamed = deltas(freeform(), call(0, "patch", '{"patch": "a"}'), "tool_calls")
    assert streamed[1:] == [[{"index": 0, "custom": {"input": "a"}}]]
