import json
import re
from typing import Any

import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.chat_completions.input import ChatBody
from tests.api import wire
from tests.api.chat_completions.bodies import BODY, CALL, HI, PATH, post
from tests.api.strict import assert_strict
from tests.api.wire import TEXT, Json, ScriptedEngine, error, events, ok, streamed

TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


IGNORED = "x-mlx-server-ignored"


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


pytestmark = pytest.mark.usefixtures("_as_before")


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


@pytest.mark.slow
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


def test_log_probabilities_of_a_whole_response_are_bounded(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a stream are not kept."""
    monkeypatch.setattr(limits, "KEPT_LOGPROBS", 3 * len(TEXT))
    asked = {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": len(TEXT)}
    ok(post(client, **asked))
    assert "more than" in error(post(client, **asked, n=2))["message"]
    with_include = {"include": ["message.output_text.logprobs"], "top_logprobs": 9}
    body = {"model": BODY["model"], "input": "hi", **with_include}
    assert error(client.post("/v1/responses", json=body))["param"] == "logprobs"
    chunks = events(post(client, **streamed({**asked, "n": 2})))
    assert not any("error" in chunk for chunk in chunks)


def test_log_probabilities_of_a_prompt_are_bounded(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = len(ok(post(client, prompt_logprobs=4))["prompt_logprobs"])
    monkeypatch.setattr(limits, "KEPT_LOGPROBS", 5 * prompt)
    ok(post(client, prompt_logprobs=4))
    assert error(post(client, prompt_logprobs=5))["param"] == "prompt_logprobs"
    echo = {"model": BODY["model"], "prompt": "a" * prompt, "echo": True, "logprobs": 5}
    for more in ({}, {"stream": True}):
        assert error(client.post("/v1/completions", json=echo | more))["param"] == "echo"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 500])
def test_numbers_that_are_none(client: TestClient, number: str) -> None:
    raw = json.dumps({**BODY, "temperature": 0.5}).replace("0.5", number)
    response = client.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert error(response)["code"] == "invalid_json"


def test_biases_reach_the_engine(client: TestClient, engine: ScriptedEngine) -> None:
    ok(post(client, logit_bias={"0": -100, "319": 100, "007": 0.5}))
    assert engine.taken[-1].sampling.logit_bias == {0: -100, 319: 100, 7: 0.5}


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


@pytest.mark.slow
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


def test_and_of_many_biases() -> None:
    biases = {str(i): "x" for i in range(1000)}
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatBody.model_validate({**BODY, "logit_bias": biases})
    assert caught.value.error_count() < 5
