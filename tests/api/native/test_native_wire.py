"""`POST /generate`: what it takes, what it refuses, and what it makes of events."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.native import NativeBody, NativeOutput, to_request
from mlx_server.errors import BadRequest
from mlx_server.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Repaired,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.families import family_named
from mlx_server.messages import Conversation, Tool
from mlx_server.requests import GenerateRequest, NamedTool, ToolChoice
from tests.api import wire
from tests.api.folding import body_of
from tests.api.wire import TEXT, Json, ScriptedEngine, error, ok

PATH = "/generate"
HI: Json = {"role": "user", "content": "hi"}
BODY: Json = {"messages": [HI]}
TOOLS = [{"name": "f", "description": "does f", "parameters": {"type": "object"}}, {"name": "g"}]


def request(family: str = "qwen3", **asked: Any) -> GenerateRequest:
    body = NativeBody.model_validate({**BODY, **asked})
    return to_request(body, "any", family_named(family))


@pytest.mark.parametrize("asked", [{}, {"model": wire.MODEL}, {"stream": False}])
def test_an_answer(client: TestClient, asked: Json) -> None:
    tokens = len(TEXT.encode()) + 1
    body = ok(client.post(PATH, json={**BODY, **asked}))
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
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_what_reaches_the_engine(client: TestClient, engine: ScriptedEngine) -> None:
    ok(client.post(PATH, json={**BODY, "temperature": 0.5, "seed": 7, "logit_bias": {"5": 1}}))
    sampling = engine.taken[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.logit_bias) == (0.5, 7, {5: 1})


def test_unknown_parameters_are_listed(client: TestClient) -> None:
    response = client.post(PATH, json={**BODY, "verbose": True, "user": "me"})
    ok(response)
    assert response.headers["x-mlx-server-ignored"] == "verbose"


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        ({}, (None, None, None)),
        ({"max_thinking_tokens": 5}, (5, None, None)),
        ({"max_thinking_tokens": 0, "max_response_tokens": 6}, (0, 6, None)),
        (
            {"two_pass": True, "max_thinking_tokens": 5, "max_response_tokens": 6},
            (5, 6, None),
        ),
        (
            {"two_pass": False, "max_thinking_tokens": 5, "max_response_tokens": 6},
            (None, None, 11),
        ),
        ({"two_pass": False, "max_response_tokens": 6}, (None, None, 6)),
        ({"two_pass": False}, (None, None, None)),
    ],
)
def test_limits(asked: Json, limits: tuple[int | None, ...]) -> None:
    found = request(**asked)
    assert (found.thinking_budget, found.max_response_tokens, found.max_tokens) == limits


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"name": "g"}, NamedTool("g")),
    ],
)
def test_tools(choice: Any, expected: ToolChoice) -> None:
    found = request(tools=TOOLS, tool_choice=choice)
    (conversation,) = found.prompts
    assert isinstance(conversation, Conversation)
    assert conversation.tools == (Tool("f", "does f", {"type": "object"}), Tool("g"))
    assert found.tool_choice == expected


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("qwen3", {"think_tag": "think", "tool_parser": "hermes"}),
        ("qwen3", {"think_tag": "<think>", "tool_parser": "qwen3"}),
        ("seed_oss", {"think_tag": "seed:think", "tool_parser": "seed_oss"}),
        ("seed_oss", {"think_tag": "<seed:think>", "tool_parser": "hermes"}),
        ("mistral", {"think_tag": "THINK"}),
        ("gpt_oss", {"think_tag": "analysis", "tool_parser": "gpt_oss"}),
        ("gpt_oss", {"think_tag": "think", "tool_parser": "hermes"}),
        ("gemma3", {"think_tag": "think"}),
        ("qwen3", {"think_tag": "thinking", "tool_parser": "openai"}),
        ("gpt_oss", {"think_tag": "<reasoning>", "tool_parser": "openai"}),
        ("gemma3", {"think_tag": "thought", "tool_parser": "openai"}),
    ],
)
def test_names_of_what_the_family_does_anyhow(family: str, asked: Json) -> None:
    assert request(family, **asked).prompts


@pytest.mark.parametrize(
    ("asked", "works"),
    [
        ({"think_tag": "reason"}, ["`think`", "`seed:think`", "`<seed:think>`"]),
        ({"think_tag": "THINK"}, ["`think`"]),
        ({"tool_parser": "llama3_json"}, ["`hermes`", "`seed_oss`"]),
        ({"tool_parser": "qwen3"}, ["`hermes`", "`seed_oss`"]),
    ],
)
def test_other_names_are_refused_and_those_that_work_are_told(
    asked: Json, works: list[str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        request("seed_oss", **asked)
    assert caught.value.param in asked
    assert all(name in caught.value.message for name in works)


def test_a_stream_is_to_be_had_elsewhere(client: TestClient) -> None:
    found = error(client.post(PATH, json={**BODY, "stream": True}))
    assert "/v1/chat/completions" in found["message"]


def gathered(*events: Event, reason: FinishReason = "stop") -> Json:
    finished = Finished(0, reason, 10, 0, reasoning_tokens=4)
    return body_of(NativeOutput(model="any"), [Started("any", 3), *events, finished])


def call(number: int, arguments: str, *, whole: bool = True) -> Sequence[Event]:
    begun = ToolCallStarted(0, number, f"c{number}", "f")
    ended = [ToolCallFinished(0, number)] if whole else []
    return [begun, ToolCallDelta(0, number, arguments), *ended]


def test_thinking_text_and_calls_apart() -> None:
    body = gathered(
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
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert not {"errors", "mlx_server"} & body.keys()


def test_a_call_that_was_cut_off_is_none() -> None:
    body = gathered(TextDelta(0, "First. "), *call(0, '{"at": "a', whole=False), reason="length")
    assert (body["tool_calls"], body["pre_tool_text"]) == ([], None)
    assert body["finish_reason"] == "length"


def test_the_text_before_a_call_is_that_before_the_first_whole_one() -> None:
    body = gathered(
        TextDelta(0, "a"), *call(0, "{", whole=False), TextDelta(0, "b"), *call(1, "{}")
    )
    assert (body["pre_tool_text"], body["response"]) == ("ab", "ab")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (json.dumps({"a": "x" * limits.NATIVE_ARGUMENTS_BYTES}), "256 KiB"),
        (
            json.dumps({"a": "ü" * (limits.NATIVE_ARGUMENTS_BYTES // 2)}, ensure_ascii=False),
            "256 KiB",
        ),
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
    assert beside["finish_reason"] == "tool_calls"
    assert beside["errors"] == alone["errors"]


def test_the_largest_arguments_are_passed_on() -> None:
    text = json.dumps({"a": "x" * (limits.NATIVE_ARGUMENTS_BYTES - len('{"a": ""}'))})
    assert len(text) == limits.NATIVE_ARGUMENTS_BYTES
    body = gathered(*call(0, text), reason="tool_calls")
    assert body["tool_calls"][0]["arguments"] == json.loads(text)


def test_what_was_mended_is_told() -> None:
    body = gathered(Repaired(0, "reasoning", "content"), TextDelta(0, "a"))
    assert body["mlx_server"]["repairs"] == [{"index": 0, "what": "reasoning", "where": "content"}]
