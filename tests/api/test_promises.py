"""What every route that computes promises: each promise once, for all of these routes."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlx_server.api import ollama
from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.completions import CompletionBody
from mlx_server.api.embeddings import EmbeddingsBody
from mlx_server.api.fields import SamplingBody, WireModel
from mlx_server.api.messages.input import MessagesBody
from mlx_server.api.native import NativeBody
from mlx_server.api.rerank import RerankBody
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.tokenize import TokenizeBody
from mlx_server.errors import EngineDied, GenerationFailed
from tests.api import wire
from tests.api.leaving import Leaver
from tests.api.messages.talking import error as anthropic_error
from tests.api.ollama.talking import refused as ollama_error
from tests.api.test_embeddings import VectorEngine
from tests.api.wire import MODEL, TEXT, Json
from tests.tiny import tiny_embedder, tiny_reranker

EMBEDDER, RERANKER = "embedder", "reranker"
HI: Json = {"role": "user", "content": "hi"}
LONG = "hi " * 2000
KINDS = {400: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error"}


def said_by_openai(response: httpx2.Response, status: int) -> str:
    return str(wire.error(response, status)["message"])


def said_by_anthropic(response: httpx2.Response, status: int) -> str:
    return anthropic_error(response, status, KINDS.get(status, "api_error"))


@dataclass(frozen=True)
class Endpoint:
    path: str
    wire_type: type[WireModel]
    body: Json
    said: Callable[[httpx2.Response, int], str] = said_by_openai
    """The message of an error, which has the form of this API."""
    long: Json | None = None
    """What makes its prompt longer than the context."""
    text: Callable[[Json], str] | None = None
    """Of a whole answer; without it there is no text."""
    usage: Callable[[Json], tuple[int, int]] | None = None
    delta: Callable[[Json], str] | None = None
    """Of an event of a stream; without it there are no streams."""
    stream_usage: Callable[[list[Json]], tuple[int, int]] | None = None
    stream_error: Callable[[Json], Json | str] = lambda event: event["error"]

    def __str__(self) -> str:
        return self.path


def openai_usage(body: Json) -> tuple[int, int]:
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def newer_usage(body: Json) -> tuple[int, int]:
    return body["usage"]["input_tokens"], body["usage"]["output_tokens"]


def ollama_usage(body: Json) -> tuple[int, int]:
    return body["prompt_eval_count"], body["eval_count"]


def anthropic_stream_usage(events: list[Json]) -> tuple[int, int]:
    (end,) = (event for event in events if event["type"] == "message_delta")
    return events[0]["message"]["usage"]["input_tokens"], end["usage"]["output_tokens"]


ENDPOINTS = (
    Endpoint(
        "/v1/chat/completions",
        ChatBody,
        {"model": MODEL, "messages": [HI]},
        long={"messages": [{**HI, "content": LONG}]},
        text=lambda body: body["choices"][0]["message"]["content"],
        usage=openai_usage,
        delta=lambda event: "".join(c["delta"].get("content") or "" for c in event["choices"]),
        stream_usage=lambda events: openai_usage(events[-1]),
    ),
    Endpoint(
        "/v1/completions",
        CompletionBody,
        {"model": MODEL, "prompt": "ab", "max_tokens": 100},
        long={"prompt": LONG},
        text=lambda body: body["choices"][0]["text"],
        usage=openai_usage,
        delta=lambda event: "".join(choice["text"] for choice in event["choices"]),
        stream_usage=lambda events: openai_usage(events[-1]),
    ),
    Endpoint(
        "/v1/responses",
        ResponsesBody,
        {"model": MODEL, "input": "hi"},
        long={"input": LONG},
        text=lambda body: body["output"][0]["content"][0]["text"],
        usage=newer_usage,
        delta=lambda event: event["delta"] if event["type"].endswith("text.delta") else "",
        stream_usage=lambda events: newer_usage(events[-1]["response"]),
        stream_error=lambda event: event["response"]["error"],
    ),
    Endpoint(
        "/v1/messages",
        MessagesBody,
        {"model": MODEL, "messages": [HI], "max_tokens": 100},
        said=said_by_anthropic,
        long={"messages": [{**HI, "content": LONG}]},
        text=lambda body: body["content"][0]["text"],
        usage=newer_usage,
        delta=lambda event: event.get("delta", {}).get("text", ""),
        stream_usage=anthropic_stream_usage,
    ),
    Endpoint(
        "/api/chat",
        ollama.OllamaChatBody,
        {"model": MODEL, "messages": [HI]},
        said=ollama_error,
        long={"messages": [{**HI, "content": LONG}]},
        text=lambda body: body["message"]["content"],
        usage=ollama_usage,
        delta=lambda event: event["message"]["content"],
        stream_usage=lambda events: ollama_usage(events[-1]),
    ),
    Endpoint(
        "/api/generate",
        ollama.GenerateBody,
        {"model": MODEL, "prompt": "hi"},
        said=ollama_error,
        long={"prompt": LONG},
        text=lambda body: body["response"],
        usage=ollama_usage,
        delta=lambda event: event["response"],
        stream_usage=lambda events: ollama_usage(events[-1]),
    ),
    Endpoint(
        "/generate",
        NativeBody,
        {"messages": [HI]},
        long={"messages": [{**HI, "content": LONG}]},
        text=lambda body: body["response"],
        usage=openai_usage,
    ),
    Endpoint(
        "/v1/embeddings", EmbeddingsBody, {"model": EMBEDDER, "input": "hi"}, long={"input": LONG}
    ),
    Endpoint("/v1/rerank", RerankBody, {"model": RERANKER, "query": "hi", "documents": ["a"]}),
    Endpoint("/api/embed", ollama.EmbedBody, {"model": EMBEDDER, "input": "hi"}, said=ollama_error),
)
COUNTING = (
    Endpoint("/tokenize", TokenizeBody, {"model": MODEL, "prompt": "hi"}),
    Endpoint("/detokenize", WireModel, {"model": MODEL, "tokens": [5]}),
    Endpoint(
        "/v1/messages/count_tokens",
        WireModel,
        {"model": MODEL, "messages": [HI]},
        said=said_by_anthropic,
    ),
    Endpoint("/api/show", WireModel, {"model": MODEL}, said=ollama_error),
)
"""These load no model."""
BY_PATH = {each.path: each for each in (*ENDPOINTS, *COUNTING)}
REFUSALS: list[Json] = [
    json.loads(line)
    for line in Path(__file__).with_name("refusals.jsonl").read_text("utf-8").splitlines()
]
"""What is set in a body, and what the error names; 200 where the value is just within its limit."""
WITH_TEXT = tuple(each for each in ENDPOINTS if each.text)
STREAMING = tuple(each for each in ENDPOINTS if each.delta)
BOTH_WAYS = [*((each, False) for each in ENDPOINTS), *((each, True) for each in STREAMING)]
whole_and_streamed = pytest.mark.parametrize(("endpoint", "stream"), BOTH_WAYS, ids=str)


@pytest.fixture(scope="module")
def models(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        MODEL: tiny_path,
        EMBEDDER: tiny_embedder(tmp_path_factory.mktemp("embedder")),
        RERANKER: tiny_reranker(tmp_path_factory.mktemp("reranker")),
    }


@pytest.fixture(scope="module")
def engine() -> VectorEngine:
    return VectorEngine()


@pytest.fixture(scope="module")
def client(models: dict[str, Path], engine: VectorEngine) -> Iterator[TestClient]:
    app = wire.app(models[MODEL], engine, others=models)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield client


pytestmark = pytest.mark.usefixtures("_as_before")


def ask(client: TestClient, endpoint: Endpoint, stream: bool, **more: Any) -> httpx2.Response:
    return client.post(endpoint.path, json=body_of(endpoint, stream, **more))


def body_of(endpoint: Endpoint, stream: bool, **more: Any) -> Json:
    streams = {"stream": stream} if endpoint.delta else {}
    counted = stream and endpoint.wire_type in (ChatBody, CompletionBody)
    options = {"stream_options": {"include_usage": True}} if counted else {}
    return {**endpoint.body, **streams, **options, **more}


def events_of(response: httpx2.Response) -> list[Json]:
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in data if line.startswith("{")]


@whole_and_streamed
def test_it_is_answered(client: TestClient, endpoint: Endpoint, stream: bool) -> None:
    response = ask(client, endpoint, stream)
    assert response.status_code == 200, response.text
    assert "x-mlx-server-ignored" not in response.headers


@pytest.mark.parametrize("endpoint", WITH_TEXT, ids=str)
def test_a_stream_is_the_whole_answer_in_pieces(client: TestClient, endpoint: Endpoint) -> None:
    assert endpoint.text
    assert endpoint.usage
    whole = wire.ok(ask(client, endpoint, stream=False))
    assert endpoint.text(whole) == TEXT
    prompt, completion = endpoint.usage(whole)
    assert completion == len(TEXT.encode()) + 1, "and the token that ends it"
    if endpoint.delta and endpoint.stream_usage:
        events = events_of(ask(client, endpoint, stream=True))
        assert "".join(map(endpoint.delta, events)) == TEXT
        assert endpoint.stream_usage(events) == (prompt, completion)


def test_a_conversation_has_the_same_tokens_on_every_route(client: TestClient) -> None:
    found = {
        endpoint.usage(wire.ok(ask(client, endpoint, stream=False)))
        for endpoint in WITH_TEXT
        if endpoint.usage and endpoint.wire_type is not CompletionBody
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("endpoint", "stream"), [*BOTH_WAYS, *((each, False) for each in COUNTING)], ids=str
)
def test_an_unknown_model_is_named(client: TestClient, endpoint: Endpoint, stream: bool) -> None:
    response = ask(client, endpoint, stream, model="none-such")
    assert "none-such" in endpoint.said(response, 404)
    if endpoint.said is said_by_openai:
        found = wire.error(response, 404)
        assert (found["param"], found["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(("endpoint", "stream"), [e for e in BOTH_WAYS if e[0].long], ids=str)
def test_too_long_a_prompt_is_refused(client: TestClient, endpoint: Endpoint, stream: bool) -> None:
    assert endpoint.long
    response = ask(client, endpoint, stream, **endpoint.long)
    endpoint.said(response, 400)
    if endpoint.said is said_by_openai:
        assert wire.error(response)["code"] == "context_length_exceeded"
        assert wire.error(response)["param"] in endpoint.long


FAILURES = [
    (EngineDied("It is gone."), 503, "It is gone."),
    (GenerationFailed("It could not go on."), 500, "It could not go on."),
    (RuntimeError("secret"), 500, ""),
]


@pytest.mark.parametrize(("failure", "status", "message"), FAILURES, ids=["died", "failed", "bug"])
@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_a_failure_is_the_status_and_a_bug_is_told_without_its_details(
    client: TestClient,
    engine: VectorEngine,
    endpoint: Endpoint,
    failure: Any,
    status: int,
    message: str,
) -> None:
    engine.failure = failure
    response = ask(client, endpoint, stream=False)
    assert message in endpoint.said(response, status)
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)


@pytest.mark.parametrize(("failure", "status", "message"), FAILURES, ids=["died", "failed", "bug"])
@pytest.mark.parametrize("endpoint", STREAMING, ids=str)
def test_a_failure_in_mid_stream_is_its_last_event(
    client: TestClient,
    engine: VectorEngine,
    endpoint: Endpoint,
    failure: Any,
    status: int,
    message: str,
) -> None:
    assert endpoint.delta
    engine.failure = failure
    response = ask(client, endpoint, stream=True)
    *events, last = events_of(response)
    assert "".join(map(endpoint.delta, events)) == TEXT[:3]
    assert message in str(endpoint.stream_error(last))
    assert "secret" not in response.text


@pytest.mark.parametrize("path", BY_PATH)
def test_values_are_refused_by_their_name_or_taken(client: TestClient, path: str) -> None:
    endpoint, wrong = BY_PATH[path], list[tuple[Json, str]]()
    for row in (each for each in REFUSALS if each["to"] == path):
        body = {**endpoint.body, **row["set"]}
        for name in row.get("without", ()):
            del body[name]
        response = client.post(path, json=body)
        if not is_answered_as(endpoint, row, response):
            wrong.append((row, response.text[:300]))
    assert wrong == []


def is_answered_as(endpoint: Endpoint, row: Json, response: httpx2.Response) -> bool:
    if row["status"] == 200 or response.status_code != row["status"]:
        return bool(response.status_code == row["status"])
    message = endpoint.said(response, row["status"])
    if endpoint.said is not said_by_openai:
        return len(message) < 400 and row["param"] in message
    error = wire.error(response, row["status"])
    named = (error["param"], error["code"]) == (row["param"], row.get("code"))
    return named and len(message) < 400


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_null_means_unset(client: TestClient, endpoint: Endpoint) -> None:
    wire_type = endpoint.wire_type
    optional = [name for name, field in wire_type.model_fields.items() if not field.is_required()]
    if issubclass(wire_type, SamplingBody):
        optional += wire_type.UNSUPPORTED
    for name in optional:
        if name in endpoint.body:
            continue
        response = client.post(endpoint.path, json={**endpoint.body, name: None})
        assert response.status_code == 200, (name, response.text)
        assert "x-mlx-server-ignored" not in response.headers, name


@pytest.mark.parametrize(
    ("endpoint", "stream", "way"),
    [
        *((endpoint, stream, "asks") for endpoint, stream in BOTH_WAYS),
        *((endpoint, True, way) for endpoint in STREAMING for way in ("reads", "does not read")),
    ],
    ids=str,
)
def test_a_client_that_leaves_ends_its_work(
    models: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
    endpoint: Endpoint,
    stream: bool,
    way: str,
) -> None:
    """It leaves while the engine computes, at the first that it is sent, or it takes nothing."""
    engine = VectorEngine()
    engine.silent = True
    body = body_of(endpoint, stream, **({"n": 3} if endpoint.wire_type is ChatBody else {}))

    async def leave() -> None:
        app = wire.app(models[MODEL], engine, others=models)
        leaves = engine.took if way == "asks" else None
        leaver = Leaver(body, leaves, stuck=way == "does not read", path=endpoint.path)
        async with app.router.lifespan_context(app):
            called = app(leaver.scope, leaver.receive, leaver.send)
            await asyncio.wait_for(called, 2 * wire.PATIENCE_SECONDS)

    with caplog.at_level(logging.INFO):
        asyncio.run(leave())
    assert engine.taken or engine.embedded
    assert not engine.running
    assert not engine.gave_up
    (access,) = [each.getMessage() for each in caplog.records if each.name == "mlx_server.access"]
    assert " gone " in access
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
