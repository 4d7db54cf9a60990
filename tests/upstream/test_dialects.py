"""Whole streams as known providers send them: comments, extra fields, names of events and all."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.upstream import connection
from tests.upstream.dialect import (
    COUNTED,
    DONE,
    LAST,
    UNKNOWN_END,
    Dialect,
    choice,
    chunk,
    function,
)
from tests.upstream.playing import (
    AnswerReader,
    Json,
    PlayingServer,
    as_message,
    as_response,
    chat,
    events,
    gateway,
    in_chunks,
    in_one,
)
from tests.upstream.providers import PROVIDERS
from tests.upstream.quirks import CALL_JSON, PARIS, PARIS_JSON, TIME, WEATHER

DIALECTS = [
    *PROVIDERS,
    Dialect(
        "LM Studio, family unknown",
        (
            chunk(
                said={"role": "assistant", "content": "<|channel|>analysis<|message|>Hm.<|end|>"}
            ),
            chunk(said={"content": "<|start|>assistant<|channel|>final<|message|>Yes"}),
            chunk("stop"),
            LAST,
            DONE,
        ),
        "Hm.",
        "Yes",
        repairs=("reasoning reasoning_content",),
        family="plain",
    ),
    *(
        Dialect(
            f"LM Studio's call, family {family}",
            (
                chunk(said={"content": "<|channel|>commentary to=functions.get_weather "}),
                chunk(said={"content": f"<|constrain|>json<|message|>{PARIS_JSON}"}),
                chunk("stop"),
                LAST,
                DONE,
            ),
            calls=(PARIS,),
            finish="tool_calls",
            repairs=("unmarked tool_calls[0]",),
            family=family,
        )
        for family in ("gpt_oss", "plain")
    ),
    Dialect(
        "Bedrock",
        (
            chunk(said={"role": "assistant", "content": "<reasoning>Hm.</reas"}),
            chunk(said={"content": "oning>Yes"}),
            chunk("stop", usage=COUNTED),
            DONE,
        ),
        "Hm.",
        "Yes",
        repairs=("reasoning content", "reasoning reasoning_content"),
    ),
    Dialect(
        "watsonx",
        (
            "id: 1\nevent: message\nretry: 3000\n",
            {**chunk(said={"role": "assistant"}), "model_id": "m", "created_at": "now"},
            "id: 2\nevent: message\n",
            chunk(said={"reasoning_content": "Hm."}),
            "id: 3\nevent: message\n",
            chunk(said={"content": "Yes"}),
            "id: 4\nevent: message\n",
            chunk("stop", {"content": ""}),
            "id: 5\nevent: message\n",
            LAST,
            "id: 6\nevent: close\ndata: {}\n\n",
        ),
        "Hm.",
        "Yes",
    ),
    *(
        Dialect(
            f"a tool's name as {name}",
            (
                choice({"tool_calls": [function(name, PARIS_JSON, id="call_1", index=0)]}),
                chunk("tool_calls"),
                LAST,
                DONE,
            ),
            calls=(PARIS,),
            finish="tool_calls",
            repairs=("name tool_calls[0].function.name",),
        )
        for name in ("Get_Weather", "get-weather", " get_weather ")
    ),
    Dialect(
        "an end that is unknown",
        (chunk(said={"content": "Yes"}), chunk("ended_by_moonlight"), LAST, DONE),
        text="Yes",
        unmet=(UNKNOWN_END.format("ended_by_moonlight"),),
    ),
    Dialect(
        "a tool's name with Harmony's namespace",
        (
            choice(
                {"tool_calls": [function("functions.get_weather", PARIS_JSON, id="a", index=0)]}
            ),
            chunk("tool_calls"),
            LAST,
            DONE,
        ),
        calls=(PARIS,),
        finish="tool_calls",
    ),
    Dialect(
        "a filter with its cause",
        (chunk(said={"content": "Ye"}), chunk("content_filter: SAFETY"), LAST, DONE),
        text="Ye",
        unmet=("content: the upstream's content filter ended the answer",),
    ),
    Dialect(
        "a call as JSON after prose",
        (chunk(said={"content": f"I look.\n{CALL_JSON}"}), chunk("stop"), LAST, DONE),
        text="I look.",
        calls=(PARIS,),
        finish="tool_calls",
        repairs=("unmarked tool_calls[0]",),
    ),
]


@pytest.fixture(scope="module")
def client(upstream: PlayingServer) -> Iterator[TestClient]:
    families = sorted({each.family for each in DIALECTS})
    with gateway(upstream.url, {name: {"family": name} for name in families}) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("read_answer", [in_one, in_chunks, as_response, as_message])
def test_it_reads(
    dialect: Dialect, read_answer: AnswerReader, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(dialect.reply)
    found = read_answer(client, {"model": dialect.family, "tools": [WEATHER, TIME]})
    assert found == {key: dialect.expected[key] for key in found}


FAILURES: dict[str, tuple[Any, ...]] = {
    "OpenRouter": (
        chunk(
            "error",
            {"content": ""},
            error={"code": 502, "message": "Provider disconnected"},
            provider="X",
        ),
    ),
    "vLLM": (chunk("abort"), LAST, DONE),
    "watsonx, cancelled": (chunk("cancelled"), LAST, DONE),
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
    begun = Dialect(name, (chunk(said={"content": "Ye"}), *FAILURES[name])).reply
    upstream.plays(begun)
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
    lines = (chunk(said={"content": "Yes"}), chunk("stop"))
    upstream.plays(replace(Dialect("", lines).reply, **ending))
    found = in_chunks(client, {"model": "plain"})
    assert (found["text"], found["finish"], found["repairs"]) == ("Yes", "stop", ["usage usage"])


def test_a_connection_serves_one_request_after_the_other(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(Dialect("", (chunk(said={"content": "Yes"}), chunk("stop"), LAST, DONE)).reply)
    for told in (in_one, in_chunks, as_response):
        assert told(client, {"model": "plain"})["text"] == "Yes"
    assert len({asked.port for asked in upstream.asked}) == 1
