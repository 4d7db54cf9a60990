import asyncio
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.chat_completions.answer import ChatOutput
from mlx_server.api.completions import CompletionOutput
from mlx_server.api.freeform import (
    FreeformInput,
    TextGrammar,
    arguments_of_text,
    freeform_tool,
    text_of_arguments,
)
from mlx_server.events import (
    Event,
    Finished,
    Repaired,
    Started,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
)
from mlx_server.http.metrics import Metrics
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.pool import Pool
from mlx_server.requests import DETERMINISTIC_HEADER
from tests.api import wire
from tests.api.folding import body_of, chunks_of
from tests.api.strict import assert_strict
from tests.api.test_metrics import played
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


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@given(st.text(), st.lists(st.integers(0, 10_000), max_size=8), st.booleans())
def test_a_text_is_decoded_however_it_is_cut(text: str, cuts: list[int], ascii: bool) -> None:
    decoded = FreeformInput()
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    found = [decoded.feed(piece) for piece in pieces(arguments, cuts)] + [decoded.finish()]
    assert "".join(found) == decoded.text == text


@given(st.text(min_size=1), st.integers(0, 10_000))
@example("code with \\uD83D", 28)
def test_what_is_decoded_early_is_never_taken_back(text: str, cut: int) -> None:
    arguments = arguments_of_text(text)
    decoded = FreeformInput()
    decoded.feed(arguments[: cut % len(arguments)])
    assert text_of_arguments(arguments).startswith(decoded.text)


def test_a_pair_of_escapes_is_one_character() -> None:
    decoded = FreeformInput()
    parts = ['{"input": "', "\\ud83d", "\\ude", '42"}']
    assert [decoded.feed(part) for part in parts] == ["", "", "", "\U0001f642"]


@cases
def test_what_the_text_of_a_call_is(arguments: str, text: str) -> None:
    assert text_of_arguments(arguments) == text


def test_a_tool_has_one_argument_and_says_what_it_must_match() -> None:
    tool = freeform_tool("patch", "Patches.", TextGrammar(definition="a+", syntax="regex"))
    assert (tool.name, tool.description) == ("patch", "Patches.")
    (argument,) = tool.parameters["properties"].values()
    assert argument["type"] == "string"
    assert "regular expression:\na+" in argument["description"]
    assert tool.parameters["required"] == ["input"]
    plain = freeform_tool("patch", None, None)
    assert "must match" not in str(plain.parameters)


ENDS = [Finished(1, "stop", TokenCounts(1)), Finished(0, "stop", TokenCounts(1))]
MENDED: list[Event] = [
    Started("any", 1, unenforced=("properties.a.not",)),
    TextDelta(0, "a"),
    Repaired(1, "reasoning", "content"),
    TextDelta(1, "b"),
    Repaired(0, "json", "tool_calls[0].function.arguments"),
    Repaired(0, "type", "tool_calls[0].function.arguments.a"),
    Violation(1, "$: no"),
    *ENDS,
]
OF_0 = [
    {"index": 0, "what": "json", "where": "tool_calls[0].function.arguments"},
    {"index": 0, "what": "type", "where": "tool_calls[0].function.arguments.a"},
]
OF_1 = [{"index": 1, "what": "reasoning", "where": "content"}]
OF_BOTH = {"unenforced": ["properties.a.not"]}
UNMET = {"unmet": [{"index": 1, "what": "$: no"}]}
NOTHING: list[Event] = [Started("any", 1), TextDelta(0, "a"), TextDelta(1, "b"), *ENDS]


def output(chat: bool) -> ChatOutput | CompletionOutput:
    return ChatOutput("any", 2) if chat else CompletionOutput("any", 1, 2)


@pytest.mark.parametrize("chat", [True, False])
def test_a_body_and_the_ends_of_a_stream_have_warnings(chat: bool) -> None:
    body = body_of(output(chat), MENDED)
    assert body["mlx_server"] == {"repairs": [*OF_0, *OF_1], **OF_BOTH, **UNMET}
    assert_strict(ChatCompletion if chat else Completion, body)
    chunks = [chunk for chunk in chunks_of(output(chat), MENDED) if "mlx_server" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["stop", "stop"]
    assert [chunk["mlx_server"] for chunk in chunks] == [
        {"repairs": OF_1, **OF_BOTH, **UNMET},
        {"repairs": OF_0, **OF_BOTH},
    ]
    for chunk in chunks:
        assert_strict(ChatCompletionChunk if chat else Completion, chunk)
    others = [body_of(output(chat), NOTHING), *chunks_of(output(chat), NOTHING)]
    assert not any("mlx_server" in each for each in others)


def test_repairs_are_counted() -> None:
    metrics = Metrics(cast(Pool, None))
    asyncio.run(played(metrics.answers, MENDED, len(MENDED)))

    def count(what: str) -> float | None:
        labels = {"model": "any", "what": what}
        return metrics.registry.get_sample_value("mlx_server_repairs_total", labels)

    assert [count(what) for what in ("json", "type", "reasoning", "name")] == [1, 1, 1, None]
