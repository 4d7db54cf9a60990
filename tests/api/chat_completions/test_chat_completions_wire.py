import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from mlx_server import limits
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
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.requests import DETERMINISTIC_HEADER
from tests.api import wire
from tests.api.folding import body_of, chunks_of
from tests.api.strict import assert_strict
from tests.api.wire import TEXT, Json, ScriptedEngine, error, events, ok, streamed
from tests.contract import answers
from tests.tables import cases

PATH = "/v1/chat/completions"
BODY: Json = {"model": wire.MODEL, "messages": [{"role": "user", "content": "hi"}]}

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


def post(client: TestClient, **asked: Any) -> httpx2.Response:
    return client.post(PATH, json={**BODY, **asked})


@pytest.mark.slow
@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
def test_bodies_and_chunks_are_what_the_sdk_expects(client: TestClient, asked: Json) -> None:
    body = ok(post(client, **asked))
    assert_strict(ChatCompletion, body)
    chunks = events(post(client, **streamed(asked)))
    for chunk in chunks:
        assert_strict(ChatCompletionChunk, chunk)
    assert len({chunk["id"] for chunk in chunks}) == 1
    n, logprobs = asked.get("n", 1), "logprobs" in asked
    assert answers.streamed(chunks, n, logprobs=logprobs) == answers.whole(body)
    (fingerprint,) = {each["system_fingerprint"] for each in (body, *chunks)}
    assert re.fullmatch("fp_[0-9a-f]{10}", fingerprint)


def test_a_stream_tells_the_role_once_and_its_usage_only_if_asked(client: TestClient) -> None:
    first, *rest = events(post(client, stream=True))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in rest)
    assert not any("usage" in chunk for chunk in [first, *rest])
    assert {chunk["object"] for chunk in rest} == {"chat.completion.chunk"}


@cases
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
    monkeypatch.setattr(limits, "KEPT_LOGPROBS", 5 * 20)
    echo = {"model": BODY["model"], "prompt": "a" * 20, "echo": True, "logprobs": 5}
    ok(client.post("/v1/completions", json={**echo, "prompt": "a", "max_tokens": 1}))
    for more in ({}, {"stream": True}):
        assert error(client.post("/v1/completions", json=echo | more))["param"] == "echo"


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


PREDICTED = "Salü, <|im_end|> Welt!"


@pytest.mark.parametrize(
    "content",
    [PREDICTED, [{"type": "text", "text": PREDICTED[:4]}, {"type": "text", "text": PREDICTED[4:]}]],
)
def test_a_prediction_is_text_of_which_no_part_is_a_control_token(
    client: TestClient, engine: ScriptedEngine, tiny_path: Path, content: Any
) -> None:
    plain = ok(post(client))
    response = post(client, prediction={"type": "content", "content": content})
    assert ok(response)["choices"] == plain["choices"]
    assert "prediction" not in response.headers.get(IGNORED, "")
    tokenizer = Tokenizer(tiny_path / "tokenizer.json")
    predicted = engine.taken[-1].prediction
    assert tokenizer.decode(predicted) == PREDICTED
    assert tokenizer.control_tokens.keys().isdisjoint(predicted)


def test_a_prediction_of_a_megabyte_is_taken_as_far_as_an_answer_may_go(
    client: TestClient, engine: ScriptedEngine
) -> None:
    prediction = {"type": "content", "content": "x" * (1 << 20)}
    ok(post(client, prediction=prediction, max_tokens=50))
    assert 0 < len(engine.taken[-1].prediction) <= 50


def test_a_prediction_for_an_answer_that_takes_no_drafts_is_reported(client: TestClient) -> None:
    response = client.post(
        PATH,
        json={**BODY, "prediction": {"type": "content", "content": "x"}},
        headers={DETERMINISTIC_HEADER: "true"},
    )
    ok(response)
    assert response.headers[IGNORED] == "prediction"


def test_usage_tells_how_many_drafted_tokens_came(
    client: TestClient, engine: ScriptedEngine
) -> None:
    engine.drafts = 5, 3
    body = ok(post(client, n=2, timings_per_token=True))
    usage, timings = body["usage"], body["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (10, 6)
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 6
    assert details["rejected_prediction_tokens"] == 4
    accepted = wire.sample(
        client.get("/metrics").text, 'mlx_server_accepted_draft_tokens_total{model="tiny"}'
    )
    assert accepted == 6
    newest = client.get("/page/history").json()["requests"][0]
    tokens = usage["completion_tokens"]
    assert newest["tokens_per_pass"] == round(tokens / (tokens - 6), 2)


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
