"""Answers as servers send them, whole streams and single quirks, read alike by every endpoint,
wherever their bytes are cut, and within bounds.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.upstream import connection
from mlx_server.upstream.responses import SseReader
from tests.upstream.failing import WRONG
from tests.upstream.playing import (
    PARIS,
    PARIS_JSON,
    SSE,
    TIME,
    USAGE,
    WEATHER,
    AnswerReader,
    Json,
    PlayingServer,
    Reply,
    answered,
    as_message,
    as_response,
    call,
    chat,
    delta,
    events,
    gateway,
    in_chunks,
    in_one,
    streamed,
    whole,
)

ANSWERS: list[Json] = yaml.load(
    Path(__file__).with_name("answers.yaml").read_text("utf-8"), yaml.CSafeLoader
)
READERS = (in_one, in_chunks, as_response, as_message)
DONE = "data: [DONE]\n\n"


def reply(*lines: Any) -> Reply:
    """A text is sent as it is; anything else as the data of an event."""
    sent = [each if isinstance(each, str) else f"data: {json.dumps(each)}\n\n" for each in lines]
    return Reply(("".join(sent).encode(),), headers=SSE)


def lines_of(answer: Json) -> list[Any]:
    said = answer.get("said") or [{"content": sign} for sign in answer.get("letters", "")]
    deltas = [each if "choices" in each else delta(**each) for each in said]
    return answer.get("lines") or [*deltas, answer.get("ends", delta("stop")), USAGE, DONE]


@pytest.fixture(scope="module")
def client(upstream: PlayingServer) -> Iterator[TestClient]:
    families = sorted({each.get("family", "gpt_oss") for each in ANSWERS})
    with gateway(upstream.url, {name: {"family": name} for name in families}) as client:
        yield client


PLAYED = [
    pytest.param(answer, READERS[(number + turn) % 4], id=f"{answer['name']}-{turn}")
    for number, answer in enumerate(ANSWERS)
    for turn in (0, 1)  # of chat, whole and streamed, Responses and Messages two in turn
]


@pytest.mark.parametrize(("answer", "read_answer"), PLAYED)
def test_it_reads(
    answer: Json, read_answer: AnswerReader, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(reply(*lines_of(answer)))
    asked = {"model": answer.get("family", "gpt_oss"), "tools": [WEATHER, TIME]}
    found = read_answer(client, asked)
    expected = {
        "reasoning": "",
        "text": "",
        "calls": [],
        "repairs": [],
        "unmet": [],
        "finish": "tool_calls" if answer.get("calls") else "stop",
        **answer,
    }
    assert found == {key: expected[key] for key in found}


FAILURES: dict[str, tuple[Any, ...]] = {
    "OpenRouter": (
        {**delta("error", content=""), "error": {"code": 502, "message": "Provider disconnected"}},
    ),
    "vLLM": (delta("abort"), USAGE, DONE),
    "watsonx, cancelled": (delta("cancelled"), USAGE, DONE),
    "Anthropic": (
        "event: error\n",
        {"type": "error", "error": {"type": "api_error", "message": "Provider disconnected"}},
    ),
    "vLLM, older": ({"object": "error", "message": "Provider disconnected", "code": 400},),
    "watsonx": (
        "event: error\n",
        {"errors": [{"code": "x", "message": "Provider disconnected"}], "status_code": 500},
    ),
    "llama.cpp": ('error: {"code": 500, "message": "Provider disconnected"}\n\n',),
    "Gemini": ('data: [{"error": {"code": 500, "message": "Provider disconnected"}}]\n\n',),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_in_the_middle_of_a_stream_is_an_error(
    name: str, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(reply(delta(content="Ye"), *FAILURES[name]))
    assert chat(client, model="plain").status_code >= 400
    streamed = chat(client, model="plain", stream=True)
    *_, last = events(streamed.text)
    assert last["error"]["message"]
    asked = {"model": "plain", "input": "hi", "stream": True}
    response = client.post("/v1/responses", json=asked)
    *_, last = events(response.text)
    assert last["type"] == "response.failed"
    message = {"model": "plain", "max_tokens": 9, "messages": [], "stream": True}
    message["messages"] = [{"role": "user", "content": "hi"}]
    *_, last = events(client.post("/v1/messages", json=message).text)
    assert last["type"] == "error"


@pytest.mark.parametrize("ending", [{"breaks": True}, {"hangs": True}, {}])
def test_an_answer_that_has_ended_is_whole_however_its_stream_ends(
    ending: Json, client: TestClient, upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "USAGE_SECONDS", 0.2)
    upstream.plays(replace(reply(delta(content="Yes"), delta("stop")), **ending))
    found = in_chunks(client, {"model": "plain"})
    assert (found["text"], found["finish"], found["repairs"]) == ("Yes", "stop", ["usage usage"])


def test_a_connection_serves_one_request_after_the_other(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(reply(delta(content="Yes"), delta("stop"), USAGE, DONE))
    for read_answer in (in_one, in_chunks, as_response):
        assert read_answer(client, {"model": "plain"})["text"] == "Yes"
    assert len({asked.port for asked in upstream.asked}) == 1


@pytest.mark.parametrize("read_answer", [in_one, in_chunks, as_response])
def test_an_upstream_that_does_not_stream(
    read_answer: AnswerReader, client: TestClient, upstream: PlayingServer
) -> None:
    message = {"role": "assistant", "content": "Yes", "reasoning": "Hm."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    upstream.plays(whole({"choices": [choice], "usage": USAGE["usage"]}))
    found = read_answer(client, {"model": "gpt_oss"})
    assert (found["reasoning"], found["text"], found["repairs"]) == ("Hm.", "Yes", [])


@pytest.mark.parametrize("name", ["content", "reasoning_content", "tool_calls"])
def test_an_answer_that_repeats_itself_is_ended(
    name: str, client: TestClient, upstream: PlayingServer
) -> None:
    line = "I think that is all there is to say about it, my friend. "
    said = call(line) if name == "tool_calls" else {name: line}
    upstream.plays(streamed(*[delta(**said)] * 2_000, delta("length"), USAGE))
    found = in_one(client, {"model": "plain", "tools": [WEATHER]})
    assert max(len(found["text"]), len(found["reasoning"])) < 130 * len(line)
    assert found["finish"] == "stop"
    assert "it repeated the same 15 words, so it was ended" in str(found["unmet"])


@pytest.mark.parametrize("read_answer", [in_one, in_chunks, as_response])
def test_the_calls_of_a_whole_message_stand_alone_however_they_are_numbered(
    read_answer: AnswerReader, client: TestClient, upstream: PlayingServer
) -> None:
    made = [call(PARIS_JSON), call('{"x": 1}', name="launch")]
    message = {"content": None, "tool_calls": [each["tool_calls"][0] for each in made]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    upstream.plays(whole({"choices": [choice], "usage": USAGE["usage"]}))
    found = read_answer(client, {"model": "gpt_oss", "tools": [WEATHER, TIME]})
    assert found["calls"] == [PARIS]
    assert found["text"].startswith('{"name": "launch"')
    assert len(found["unmet"]) == 1


def test_usage_that_is_missing_is_estimated_and_reported(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(streamed(delta(content="Yes, it is."), delta("stop")))
    assert in_one(client, {"model": "gpt_oss"})["repairs"] == ["usage usage"]


def read(chunks: list[bytes]) -> list[str]:
    reader = SseReader()
    found = [text for chunk in chunks for text in reader.feed(chunk)]
    return found + reader.finish()


BREAKS = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.lists(
    st.one_of(
        st.just(""),
        st.just(": a comment"),
        st.just("event: message"),
        st.text(alphabet="aé🙂: {}", max_size=8).map("data: {}".format),
    ),
    max_size=12,
)


@given(LINES, BREAKS, st.lists(st.integers(0, 200), max_size=8))
def test_where_it_is_cut_changes_nothing(lines: list[str], end: str, cuts: list[int]) -> None:
    stream = "".join(line + end for line in lines).encode()
    at = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[begin:stop] for begin, stop in pairwise(at)]
    assert read(chunks) == read([stream]) == read([bytes([byte]) for byte in stream])


def test_what_the_fields_say() -> None:
    stream = b"id: 1\nevent: x\ndata:{\ndata: }\n\n: ping\n\ndata: [DONE]"
    assert read([stream]) == ["{\n}", "[DONE]"]


def test_text_that_is_no_utf_8() -> None:
    with pytest.raises(UpstreamFailed, match="not UTF-8"):
        read([b"data: \xff\n\n"])


@pytest.mark.parametrize("sent", [b"x", b"data: x\n"], ids=["a line", "an event of many lines"])
def test_an_event_without_an_end(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UPSTREAM_LINE_BYTES", 1000)
    with pytest.raises(UpstreamFailed, match="too long"):
        read([sent] * (limits.UPSTREAM_LINE_BYTES + 2))


# Log probabilities stay with the text of their tokens, whatever is taken out.


ASKED: Any = {"model": "qwen3", "logprobs": True, "top_logprobs": 1}


def scored(text: str, *tokens: str, **more: Any) -> Any:
    """A chunk with the log probability -0.5 for each token, and two alternatives."""
    top = [{"token": "?", "logprob": -3.0, "bytes": [63]}, {"token": "!", "logprob": -2.0}]
    content = [{"token": each, "logprob": -0.5, "top_logprobs": top} for each in tokens or [text]]
    found = delta(content=text, **more)
    found["choices"][0]["logprobs"] = {"content": content}
    return found


def tokens_of(found: Any) -> list[str]:
    return [each["token"] for each in found["choices"][0]["logprobs"]["content"]]


def test_they_have_openais_form(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(streamed(scored("It "), scored("rains.", "rain", "s."), delta("stop"), USAGE))
    found = answered(client, **ASKED)
    assert tokens_of(found) == ["It ", "rain", "s."]
    assert found["choices"][0]["logprobs"]["content"][0] == {
        "token": "It ",
        "logprob": -0.5,
        "bytes": list(b"It "),
        "top_logprobs": [{"token": "!", "logprob": -2.0, "bytes": [33]}],
    }


def test_a_token_may_belong_to_two_texts(client: TestClient, upstream: PlayingServer) -> None:
    """What may begin a delimiter is held back."""
    upstream.plays(streamed(scored("1 <"), scored(" 2"), delta("stop"), USAGE))
    assert tokens_of(answered(client, **ASKED)) == ["1 <", " 2"]


def test_those_of_thoughts_in_the_text_are_left_out(
    client: TestClient, upstream: PlayingServer
) -> None:
    pieces = [scored(each) for each in ("<think>", "Rain", "?", "</think>", "\n\n", "Rain", "!")]
    upstream.plays(streamed(*pieces, delta("stop"), USAGE))
    found = answered(client, **ASKED)
    assert found["choices"][0]["message"]["content"] == "Rain!"
    assert tokens_of(found) == ["Rain", "!"]


def test_those_after_a_stop_string_are_left_out(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(streamed(*map(scored, ("One", ", ", "two")), delta("stop"), USAGE))
    assert tokens_of(answered(client, stop=[", t"], **ASKED)) == ["One"]


def test_those_of_a_body_that_is_not_streamed(client: TestClient, upstream: PlayingServer) -> None:
    body = {"message": {"content": "Yes."}, "logprobs": scored("Yes.")["choices"][0]["logprobs"]}
    upstream.plays(whole({"choices": [{**body, "finish_reason": "stop"}]}))
    assert tokens_of(answered(client, **ASKED)) == ["Yes."]


def test_an_upstream_that_sends_none(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(streamed(delta(content="Yes"), delta("stop"), USAGE))
    found = answered(client, **ASKED)
    assert [each["what"] for each in found["mlx_server"]["unmet"]] == [
        "logprobs: the upstream sent none"
    ]


@pytest.mark.parametrize("wrong", [*WRONG, -1, [300]], ids=ascii)
def test_wrong_types(wrong: Any, client: TestClient, upstream: PlayingServer) -> None:
    entry = {"token": wrong, "logprob": wrong, "bytes": wrong, "top_logprobs": wrong}
    spelled = {"token": "Yes", "logprob": -1.0, "bytes": wrong, "top_logprobs": [wrong]}
    lists = {"tokens": wrong, "token_logprobs": wrong, "top_logprobs": wrong}
    for said in (wrong, {"content": wrong}, {"content": [wrong, entry, spelled]}, lists):
        piece = delta("stop", content="Yes")
        piece["choices"][0]["logprobs"] = said
        reply: Reply = streamed(piece, USAGE)
        upstream.plays(reply)
        assert answered(client, **ASKED)["choices"][0]["message"]["content"] == "Yes"
