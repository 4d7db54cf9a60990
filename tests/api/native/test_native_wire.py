"""`POST /generate`: what it answers, and what it makes of events. What bodies ask for is in
tests/api/requests.jsonl."""

import json
from collections.abc import Sequence

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.native import NativeOutput
from mlx_server.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Repaired,
    Started,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from tests.api import wire
from tests.api.folding import body_of
from tests.api.wire import TEXT, Json, error, ok

UNDRAFTED = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
BODY: Json = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("asked", [{}, {"model": wire.MODEL}, {"stream": False}])
def test_an_answer(client: TestClient, asked: Json) -> None:
    tokens = len(TEXT.encode()) + 1
    body = ok(client.post("/generate", json={**BODY, **asked}))
    prompt_tokens = body["usage"].pop("prompt_tokens")
    assert body == {
        "model": wire.MODEL,
        "thinking": "",
        "response": TEXT,
        "tool_calls": [],
        "pre_tool_text": None,
        "finish_reason": "stop",
        "usage": {
            "completion_tokens": tokens,
            "total_tokens": tokens + prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, **UNDRAFTED},
        },
    }


def test_a_stream_is_to_be_had_elsewhere(client: TestClient) -> None:
    found = error(client.post("/generate", json={**BODY, "stream": True}))
    assert "/v1/chat/completions" in found["message"]


def gathered(*events: Event, reason: FinishReason = "stop") -> Json:
    finished = Finished(0, reason, TokenCounts(10, 0, reasoning_tokens=4))
    return body_of(NativeOutput("any"), [Started("any", 3), *events, finished])


def call(number: int, arguments: str, *, whole: bool = True) -> Sequence[Event]:
    begun = ToolCallStarted(0, number, f"c{number}", "f")
    ended = [ToolCallFinished(0, number)] if whole else []
    return [begun, ToolCallDelta(0, number, arguments), *ended]


def test_thinking_text_and_calls_apart() -> None:
    body = gathered(
        Repaired(0, "reasoning", "content"),
        ReasoningDelta(0, "Well. "),
        ReasoningDelta(0, "So."),
        TextDelta(0, "I "),
        TextDelta(0, "look. "),
        *call(0, '{"at": "a", "n": 1}'),
        *call(1, "{}"),
        TextDelta(0, "Done."),
        reason="tool_calls",
    )
    assert (body["thinking"], body["response"]) == ("Well. So.", "I look. ")
    assert (body["pre_tool_text"], body["post_tool_text"]) == ("I look. ", "Done.")
    assert body["tool_calls"] == [
        {"id": "c0", "name": "f", "arguments": {"at": "a", "n": 1}},
        {"id": "c1", "name": "f", "arguments": {}},
    ]
    assert body["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4, **UNDRAFTED}
    assert body["mlx_server"]["repairs"] == [{"index": 0, "what": "reasoning", "where": "content"}]
    assert "errors" not in body


def test_a_call_that_was_cut_off_is_none_and_the_text_goes_on_to_the_first_whole_one() -> None:
    cut = call(0, '{"at": "a', whole=False)
    body = gathered(TextDelta(0, "a"), *cut, reason="length")
    assert (body["tool_calls"], body["pre_tool_text"]) == ([], None)
    assert body["finish_reason"] == "length"
    body = gathered(TextDelta(0, "a"), *cut, TextDelta(0, "b"), *call(1, "{}"))
    assert (body["pre_tool_text"], body["response"]) == ("ab", "ab")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (json.dumps({"a": "x" * limits.NATIVE_ARGUMENTS_BYTES}), "256 KiB"),
        ('{"a": "%s"}' % ("ü" * (limits.NATIVE_ARGUMENTS_BYTES // 2)), "256 KiB"),
        ("[1]", "not a JSON object"),
        ('{"a": NaN}', "NaN"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "nested"),
        ('{"a": "\ud800"}', "UTF-8"),
        ("", "empty"),
    ],
)
def test_calls_that_nobody_should_make(arguments: str, why: str) -> None:
    alone = gathered(*call(0, arguments), reason="tool_calls")
    assert (alone["tool_calls"], alone["finish_reason"]) == ([], "error")
    (found,) = alone["errors"]
    assert (found["id"], found["name"]) == ("c0", "f")
    assert why in found["message"]
    assert len(found["message"]) < 300
    beside = gathered(*call(0, arguments), *call(1, '{"a": 1}'), reason="tool_calls")
    assert beside["tool_calls"] == [{"id": "c1", "name": "f", "arguments": {"a": 1}}]
    assert (beside["finish_reason"], beside["errors"]) == ("tool_calls", alone["errors"])


def test_the_largest_arguments_are_passed_on() -> None:
    text = json.dumps({"a": "x" * (limits.NATIVE_ARGUMENTS_BYTES - len('{"a": ""}'))})
    body = gathered(*call(0, text), reason="tool_calls")
    assert body["tool_calls"][0]["arguments"] == json.loads(text)
