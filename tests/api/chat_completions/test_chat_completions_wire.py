import json
import re
from typing import Any

import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.chat_completions.protocol import ChatBody
from tests.api import wire
from tests.api.chat_completions.bodies import BODY, CALL, HI, PATH, post, refused
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


@pytest.mark.parametrize("name", ["model", "messages"])
@pytest.mark.parametrize("value", [None, 5, [], {}, "", True])
def test_required_fields(client: TestClient, name: str, value: Any) -> None:
    assert refused(client, **{name: value})["param"] == name
    left_out = {key: found for key, found in BODY.items() if key != name}
    assert error(client.post(PATH, json=left_out))["param"] == name


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_within_and_without_their_limits(client: TestClient, name: str) -> None:
    asked = {"logprobs": True} if name == "top_logprobs" else {}
    inside, outside = NUMBERS[name]
    with_point = [float(inside[0])] if name in WHOLE else []
    for value in [*inside, *with_point]:
        ok(post(client, **asked, **{name: value}))
    fractions = [0.5, 1.5, 1e308, float(2**63)] if name in WHOLE else []
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
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_what_can_not_be_had_is_refused(client: TestClient, asked: Json, param: str) -> None:
    assert refused(client, **asked)["param"] == param


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


def test_and_of_many_biases() -> None:
    biases = {str(i): "x" for i in range(1000)}
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatBody.model_validate({**BODY, "logit_bias": biases})
    assert caught.value.error_count() < 5
