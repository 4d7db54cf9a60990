import asyncio
import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient
from starlette.types import Message

from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.errors import GenerationFailed
from tests.api import wire
from tests.api.strict import assert_strict
from tests.api.wire import TEXT, Json, ScriptedEngine, error, events, ok, streamed

PATH = "/v1/chat/completions"
HI: Json = {"role": "user", "content": "hi"}
BODY: Json = {"model": wire.MODEL, "messages": [HI]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IGNORED = "x-mlx-server-ignored"

OPTIONAL = [name for name, field in ChatBody.model_fields.items() if not field.is_required()]

# What is asked for next to BODY, in all of which streaming equals not streaming.
REQUESTS: dict[str, Json] = {
    "plain": {},
    "three answers": {"n": 3},
    "log probabilities": {"logprobs": True},
    "and alternatives": {"logprobs": True, "top_logprobs": 3},
    "cut off": {"max_tokens": 4, "logprobs": True},
    "cut off inside a character": {"max_tokens": 5, "logprobs": True},
    "a stop string": {"stop": "!", "logprobs": True},
    "a stop string across tokens": {"stop": ["nd so", "界"], "logprobs": True},
    "a stop string at once": {"stop": TEXT[0], "logprobs": True},
    "a stop string that only begins": {"stop": "on.!", "logprobs": True},
}

# (least, most) that are taken, and what is just outside
NUMBERS: dict[str, tuple[list[float], list[float]]] = {
    "temperature": ([0, 2], [-0.001, 2.001]),
    "top_p": ([0.001, 1], [0, 1.001, -1]),
    "top_k": ([-1, 0, 1_000_000], [-2, 1_000_001]),
    "min_p": ([0, 1], [-0.001, 1.001]),
    "repetition_penalty": ([0.001, 10], [0, 10.001]),
    "presence_penalty": ([-2, 2], [-2.001, 2.001]),
    "frequency_penalty": ([-2, 2], [-2.001, 2.001]),
    "n": ([1, 16], [0, 17, 10**9]),
    "seed": ([-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, 2**70]),
    "max_tokens": ([-1, 1, 10**18], [0, -2]),
    "max_completion_tokens": ([-1, 1, 10**18], [0, -2]),
    "top_logprobs": ([0, 20], [-1, 21]),
    "thinking_budget": ([0, 2**53 - 1], [-1, 2**53, 10**30]),
    "max_response_tokens": ([1, 2**53 - 1], [0, -1, 2**53, 10**30]),
}
WHOLE = (
    "top_k",
    "n",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "top_logprobs",
    "thinking_budget",
    "max_response_tokens",
)
NO_NUMBERS: list[Any] = ["1", "", True, False, [], [1], {}, {"value": 1}]

pytestmark = pytest.mark.usefixtures("_as_before")


def post(client: TestClient, **asked: Any) -> httpx2.Response:
    return client.post(PATH, json={**BODY, **asked})


def refused(client: TestClient, **asked: Any) -> Json:
    return error(post(client, **asked))


def gathered(chunks: list[Json]) -> Json:
    """What a client makes of the chunks of a stream: the body of the answer that is not one."""
    *parts, last = chunks
    choices: dict[int, Json] = {}
    for part in parts:
        assert part["usage"] is None
        (choice,) = part["choices"]
        found = choices.setdefault(choice["index"], {"content": "", "logprobs": [], "end": None})
        assert found["end"] is None
        found["content"] += choice["delta"].get("content") or ""
        found["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        found["end"] = choice["finish_reason"]
    assert last["choices"] == []
    return {"choices": [choices[i] for i in sorted(choices)], "usage": last["usage"]}


def summary(body: Json) -> Json:
    choices = [
        {
            "content": choice["message"]["content"],
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "end": choice["finish_reason"],
        }
        for choice in body["choices"]
    ]
    return {"choices": choices, "usage": body["usage"]}


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
def test_bodies_and_chunks_are_what_the_sdk_expects(client: TestClient, asked: Json) -> None:
    body = ok(post(client, **asked))
    assert_strict(ChatCompletion, body)
    chunks = events(post(client, **streamed(asked)))
    for chunk in chunks:
        assert_strict(ChatCompletionChunk, chunk)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert gathered(chunks) == summary(body)
    (fingerprint,) = {each["system_fingerprint"] for each in (body, *chunks)}
    assert re.fullmatch("fp_[0-9a-f]{10}", fingerprint)


def test_an_answer(client: TestClient) -> None:
    body = ok(post(client))
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    tokens = len(TEXT.encode()) + 1  # and the one that ends it
    assert body["usage"]["completion_tokens"] == tokens
    assert body["usage"]["total_tokens"] == tokens + body["usage"]["prompt_tokens"]
    assert (body["object"], body["model"]) == ("chat.completion", wire.MODEL)


def test_a_stream_tells_the_role_once_and_its_usage_only_if_asked(client: TestClient) -> None:
    first, *rest = events(post(client, stream=True))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in rest)
    assert not any("usage" in chunk for chunk in [first, *rest])
    assert {chunk["object"] for chunk in rest} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("!", "Salü, 世界"),
        (["never", " so"], "Salü, 世界! 🙂 And"),
        (["界!", "世"], "Salü, "),
        (TEXT[0], ""),
        ([], TEXT),
        ("on.!", TEXT),
    ],
)
def test_stop_strings_are_not_part_of_the_answer(client: TestClient, stop: Any, text: str) -> None:
    (choice,) = ok(post(client, stop=stop))["choices"]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"


def test_each_token_has_its_log_probability(client: TestClient) -> None:
    (choice,) = ok(post(client, logprobs=True, top_logprobs=2))["choices"]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == TEXT.encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


@pytest.mark.parametrize("name", [*OPTIONAL, *ChatBody.UNSUPPORTED])
def test_null_means_unset(client: TestClient, name: str) -> None:
    response = post(client, **{name: None})
    assert ok(response)["choices"][0]["message"]["content"] == TEXT
    assert IGNORED not in response.headers


@pytest.mark.parametrize("name", ["model", "messages"])
@pytest.mark.parametrize("value", [None, 5, [], {}, "", True])
def test_required_fields(client: TestClient, name: str, value: Any) -> None:
    assert refused(client, **{name: value})["param"] == name
    left_out = {key: found for key, found in BODY.items() if key != name}
    assert error(client.post(PATH, json=left_out))["param"] == name


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_within_and_without_their_limits(client: TestClient, name: str) -> None:
    asked = {"logprobs": True} if name == "top_logprobs" else {}
    inside, outside = NUMBERS[name]
    for value in inside:
        ok(post(client, **asked, **{name: value}))
    fractions = [0.5, 1.0] if name in WHOLE else []
    for wrong in [*outside, *fractions, *NO_NUMBERS]:
        assert refused(client, **asked, **{name: wrong})["param"] == name, wrong


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 500])
def test_numbers_that_are_none(client: TestClient, number: str) -> None:
    raw = json.dumps({**BODY, "temperature": 0.5}).replace("0.5", number)
    response = client.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert error(response)["code"] == "invalid_json"


@pytest.mark.parametrize("name", ["stream", "logprobs", "parallel_tool_calls"])
@pytest.mark.parametrize("value", [1, 0, "true", [], {}])
def test_truth_is_not_guessed(client: TestClient, name: str, value: Any) -> None:
    assert refused(client, **{name: value})["param"] == name


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({"1": 101}, "logit_bias.1"),
        ({"1": -100.5}, "logit_bias.1"),
        ({"1": "5"}, "logit_bias.1"),
        ({"1": True}, "logit_bias.1"),
        ({"1": None}, "logit_bias.1"),
        ({"x": 1}, "logit_bias"),
        ({"-1": 1}, "logit_bias"),
        ({"١": 1}, "logit_bias"),
        ({"1" * 10: 1}, "logit_bias"),
        ({str(wire.VOCABULARY): 1}, "logit_bias"),
        ({"999999999": 1}, "logit_bias"),
        ({str(i): 1 for i in range(4097)}, "logit_bias"),
        ([1], "logit_bias"),
        (5, "logit_bias"),
    ],
)
def test_biases_that_are_refused(client: TestClient, bias: Any, param: str) -> None:
    assert refused(client, logit_bias=bias)["param"] == param


def test_biases_reach_the_engine(client: TestClient, engine: ScriptedEngine) -> None:
    ok(post(client, logit_bias={"0": -100, "319": 100, "007": 0.5}))
    assert engine.taken[-1].sampling.logit_bias == {0: -100, 319: 100, 7: 0.5}


@pytest.mark.parametrize(
    ("stop", "param"),
    [
        (5, "stop"),
        ([5], "stop[0]"),
        ("", "stop"),
        ([""], "stop[0]"),
        ("x" * 1025, "stop"),
        (["x"] * 65, "stop"),
        ({}, "stop"),
        ([["x"]], "stop[0]"),
    ],
)
def test_stops_that_are_refused(client: TestClient, stop: Any, param: str) -> None:
    assert refused(client, stop=stop)["param"] == param


def test_unknown_parameters_are_listed(client: TestClient) -> None:
    response = post(client, mirostat=2, repetition_context_size=10**18, unset=None, user="me")
    ok(response)
    assert response.headers[IGNORED] == "mirostat, repetition_context_size"


def test_what_the_template_has_no_place_for_is_listed(client: TestClient) -> None:
    response = post(
        client, tools=[TOOL], reasoning_effort="low", chat_template_kwargs={"messages": [], "a": 1}
    )
    ok(response)
    assert response.headers[IGNORED].split(", ") == [
        "reasoning_effort",
        "chat_template_kwargs.messages",
        "chat_template_kwargs.a",
    ]


@pytest.mark.parametrize(
    "names",
    [
        ["a\r\nX-Evil: 1"],
        ["a\nb", "c\0d", "e\tf", ""],
        ["ümlaut", "世界", "🙂", "a, b", "a;b"],
        ["x" * 10_000],
        [f"name{i}" for i in range(10_000)],
        ["🙂" * 64 + str(i) for i in range(100)],
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_names_can_not_break_out_of_the_header(
    client: TestClient, names: list[str], stream: bool
) -> None:
    response = post(client, stream=stream, **dict.fromkeys(names, 1))
    assert response.status_code == 200
    assert "x-evil" not in response.headers
    value = response.headers[IGNORED]
    assert value.isascii()
    assert value.isprintable()
    assert 0 < len(value) <= 2048


@pytest.mark.parametrize("name", ChatBody.UNSUPPORTED)
@pytest.mark.parametrize("value", ["x", {}, [], False, 0])
def test_known_unsupported_ones_are_refused_by_name(
    client: TestClient, name: str, value: Any
) -> None:
    found = refused(client, **{name: value})
    assert found["param"] == name
    assert name in found["message"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_what_can_not_be_had_is_refused(client: TestClient, asked: Json, param: str) -> None:
    assert refused(client, **asked)["param"] == param


def written(arguments: str) -> str:
    """A call, where the template has no place for one."""
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "x"}, "x"),
        ({"role": "user", "content": None}, ""),
        ({"role": "user"}, ""),
        ({"role": "user", "content": []}, ""),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "x"),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "input_text", "text": "y"},
                    {"type": "output_text", "text": "z", "annotations": []},
                ],
            },
            "x\ny\nz",
        ),
        ({"role": "system", "content": "x", "name": "me"}, "x"),
        ({"role": "developer", "content": "x"}, "x"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, written('{"a": 1}')),
        ({"role": "assistant", "refusal": "no"}, "no"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y", "audio": None}, "x"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, None]}}}],
            },
            written('{"a": [1, null]}'),
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, written("{}")),
    ],
)
def test_messages_of_all_shapes(
    client: TestClient, engine: ScriptedEngine, tiny_path: Path, message: Json, text: str
) -> None:
    ok(post(client, messages=[HI, message, HI]))
    tokenizer = Tokenizer(tiny_path / "tokenizer.json")
    prompt = "".join(tokenizer.spelling(token) for token in engine.taken[-1].prompt)
    role = {"developer": "system"}.get(message["role"], message["role"])
    hi = "<|im_start|>user\nhi<|im_end|>\n"
    assert prompt == (f"{hi}<|im_start|>{role}\n{text}<|im_end|>\n{hi}<|im_start|>assistant\n")


CALLED: Json = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "x"}


@pytest.mark.parametrize(
    "result", [RESULT, {**RESULT, "content": [{"type": "text", "text": "x"}], "name": "f"}]
)
def test_results_of_all_shapes(
    client: TestClient, engine: ScriptedEngine, tiny_path: Path, result: Json
) -> None:
    ok(post(client, messages=[HI, CALLED, result]))
    tokenizer = Tokenizer(tiny_path / "tokenizer.json")
    prompt = "".join(tokenizer.spelling(token) for token in engine.taken[-1].prompt)
    assert prompt.endswith("<|im_start|>tool\nx<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "messages", [[HI, RESULT], [HI, RESULT, CALLED], [HI, CALLED, {**RESULT, "tool_call_id": "d"}]]
)
def test_a_result_needs_an_earlier_call(client: TestClient, messages: list[Json]) -> None:
    found = refused(client, messages=messages)
    assert found["param"].endswith(".tool_call_id")
    assert "no earlier call" in found["message"]


@pytest.mark.parametrize(
    ("asked", "ignored"),
    [
        ({"messages": [{**HI, "name": "me"}]}, "messages.name"),
        ({"messages": [{**HI, "tool_calls": [CALL]}]}, "messages.tool_calls"),
        ({"messages": [{**HI, "tool_call_id": "c1"}]}, "messages.tool_call_id"),
        ({"messages": [{**HI, "reasoning": "Hm"}]}, "messages.reasoning"),
        ({"messages": [{**HI, "cache_control": {}}]}, "messages.cache_control"),
        (
            {"messages": [{**HI, "content": [{"type": "text", "text": "hi", "cache": 1}]}]},
            "messages.content.cache",
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": "x", "refusal": "no"}, HI]},
            "messages.refusal",
        ),
        (
            {"tools": [{**TOOL, "function": {**TOOL["function"], "cache": 1}}]},
            "tools.function.cache",
        ),
        ({"response_format": {"type": "json_object", "name": "x"}}, "response_format.name"),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, None),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"verbosity": "low"}, "verbosity"),
        ({"verbosity": "medium", "prompt_cache_key": "x"}, None),
        (
            {"prompt_cache_retention": "24h", "context_management": [], "moderation": {}},
            "prompt_cache_retention, context_management, moderation",
        ),
        ({"enable_thinking": True}, "enable_thinking"),
    ],
)
def test_the_header_names_what_was_sent(
    client: TestClient, asked: Json, ignored: str | None
) -> None:
    response = post(client, **asked)
    assert response.status_code == 200, response.text
    assert response.headers.get(IGNORED) == ignored


def test_options_of_a_stream_need_one(client: TestClient) -> None:
    found = refused(client, stream_options={"include_usage": True})
    assert found["param"] == "stream_options"
    assert "`stream: true`" in found["message"]
    ok(post(client, stream_options=None))


def test_usage_of_every_chunk(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(post(client, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert len(set(counts)) > len(TEXT) / 2
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
    without = events(post(client, stream=True, stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in chunk for chunk in without)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "role"),
        ({"role": "User", "content": "x"}, "role"),
        ({"role": None, "content": "x"}, "role"),
        ({"content": "x"}, "role"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": {}}, "content"),
        ({"role": "user", "content": ["x"]}, "content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "sound"}]}, "content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "file"}]}, "content[0].file"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": ""}, "tool_call_id"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]},
            "tool_calls[0].custom",
        ),
        ("x", ""),
        (None, ""),
        ([], ""),
    ],
)
def test_messages_that_are_refused(client: TestClient, message: Any, param: str) -> None:
    where = f"messages[1].{param}".removesuffix(".")
    assert refused(client, messages=[HI, message])["param"] == where


@pytest.mark.parametrize("name", ["messages", "tools", "modalities", "stop", "guided_choice"])
def test_of_many_wrong_items_one_is_reported(name: str) -> None:
    """Each report takes some 500 bytes, and a body can hold eight million wrong items."""
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatBody.model_validate({**BODY, name: [0] * 1000})
    assert caught.value.error_count() < 5


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [0] * 1000},
        {"role": "assistant", "tool_calls": [0] * 1000},
    ],
)
def test_and_of_many_in_a_message(message: Json) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatBody.model_validate({**BODY, "messages": [message] * 1000})
    assert caught.value.error_count() < 5


def test_and_of_many_biases() -> None:
    biases = {str(i): "x" for i in range(1000)}
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatBody.model_validate({**BODY, "logit_bias": biases})
    assert caught.value.error_count() < 5


def test_an_unknown_model_is_no_stream(client: TestClient) -> None:
    found = error(post(client, model="other", stream=True), status=404)
    assert (found["param"], found["code"]) == ("model", "model_not_found")


def test_too_long_a_prompt_is_no_stream(client: TestClient) -> None:
    found = error(post(client, messages=[{**HI, "content": "x" * 3000}], stream=True))
    assert (found["param"], found["code"]) == ("messages", "context_length_exceeded")


def test_a_failure_in_mid_stream_is_its_last_event(
    client: TestClient, engine: ScriptedEngine
) -> None:
    engine.failure = GenerationFailed("No more.")
    *chunks, last = events(post(client, stream=True))
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == TEXT[:3]
    assert wire.error_of(last)["code"] == "generation_failed"


def test_a_failure_before_the_end_of_an_answer_is_its_status(
    client: TestClient, engine: ScriptedEngine
) -> None:
    engine.failure = GenerationFailed("No more.")
    assert error(post(client), status=500)["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [True, False])
def test_a_mistake_of_ours_is_told_without_its_details(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("mlx_server.api.accumulator.Accumulator.add", broken)
    response = post(client, stream=stream)
    found = wire.error_of(events(response)[-1]) if stream else error(response, status=500)
    assert found["code"] == "internal_error"
    assert "secret" not in response.text


class Leaver:
    """A client, as the app sees it, that sends its request and leaves some time later.

    leaves: when; None: as soon as it is sent something. stuck: nothing gets through to it.
    """

    def __init__(
        self, body: Json, leaves: asyncio.Event | None = None, *, stuck: bool = False
    ) -> None:
        self.raw = json.dumps(body).encode()
        self.sent: list[Message] = []
        self._coming: list[Message] = [{"type": "http.request", "body": self.raw}]
        self._sending = asyncio.Event()
        self._leaves = leaves or self._sending
        self._stuck = stuck

    @property
    def scope(self) -> dict[str, Any]:
        length = str(len(self.raw)).encode()
        return {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", length),
            ],
            "state": {},
        }

    async def receive(self) -> Message:
        if self._coming:
            return self._coming.pop()
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._sending.set()
        if self._stuck:
            await asyncio.Event().wait()
        self.sent.append(message)


@dataclass
class Stage:
    """An app whose engine takes rows and says nothing, and whether they are free afterwards."""

    model: Path
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    free: list[bool] = field(default_factory=list)

    def play(self, *clients: Leaver) -> None:
        self.engine.silent = True
        asyncio.run(self._play(clients))

    async def _play(self, clients: tuple[Leaver, ...]) -> None:
        app = wire.app(self.model, self.engine)
        async with app.router.lifespan_context(app):
            for client in clients:
                called = app(client.scope, client.receive, client.send)
                await asyncio.wait_for(called, 2 * wire.PATIENCE_SECONDS)
                assert not self.engine.gave_up
                self.free.append(not self.engine.running)
                self.engine.took.clear()


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_takes_its_rows_along(
    tiny_path: Path, caplog: pytest.LogCaptureFixture, n: int
) -> None:
    stage = Stage(tiny_path)

    with caplog.at_level(logging.INFO):
        stage.play(
            Leaver({**BODY, "n": n}, stage.engine.took),
            Leaver({**BODY, "n": n, "stream": True}, stage.engine.took),
            Leaver({**BODY, "n": n, "stream": True}),
        )
    assert len(stage.engine.taken) == 3 * n
    assert stage.free == [True] * 3
    access = [record.args for record in caplog.records if record.name == "mlx_server.access"]
    assert [args[2] for args in access if isinstance(args, tuple)] == ["gone"] * 3
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_rows_are_free_once_the_app_returns_even_if_nothing_was_sent(tiny_path: Path) -> None:
    stage = Stage(tiny_path)
    client = Leaver({**BODY, "stream": True}, stuck=True)
    stage.play(client)
    assert stage.engine.taken
    assert client.sent == []
    assert stage.free == [True]
