"""What valid bodies ask for: the request that each route makes of one, the prompt that the engine
gets, and the header that names what has no effect. One line of requests.jsonl is one body, one of
histories.jsonl a history as agents send it again with every turn; those of fields.jsonl use all
fields of their routes."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Request
from openai import OpenAI
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from mlx_server.api import handlers
from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.completions import CompletionBody
from mlx_server.api.fields import WireModel
from mlx_server.events import Event
from mlx_server.http import errors
from mlx_server.http.middleware import VERSIONED, served_path
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.request_threads import SMALL_BYTES, in_thread
from mlx_server.requests import GenerateRequest, JsonFormat
from tests.api import wire
from tests.api.messages.talking import BODY
from tests.api.test_routes import routes
from tests.api.wire import MODEL, Json, ScriptedEngine
from tests.tables import cases

HI: Json = {"role": "user", "content": "hi"}
MESSAGES: Json = {"model": MODEL, "messages": [HI]}
BODIES: Mapping[str, Json] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/responses": {"model": MODEL, "input": "hi", "store": False},
    "/v1/messages": {**MESSAGES, "max_tokens": 4},
    "/api/chat": {**MESSAGES, "stream": False},
    "/api/generate": {"model": MODEL, "prompt": "hi", "stream": False},
    "/generate": {"messages": [HI]},
}
ROWS: list[Json] = [
    json.loads(line)
    for name in ("requests.jsonl", "histories.jsonl", "fields.jsonl")
    for line in Path(__file__).with_name(name).read_text("utf-8").splitlines()
]
"""`set` is added to the body of the route `to`. Of the request and its conversation the row has
some fields, without those that are unset; `prompt` is a text in the prompt."""
BLOCK = 25


class Recorder:
    def __init__(self) -> None:
        self.request: GenerateRequest | None = None

    def recorded(
        self, request: GenerateRequest, events: AsyncGenerator[Event]
    ) -> AsyncGenerator[Event]:
        self.request = request
        return events


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def client(tiny_path: Path, engine: ScriptedEngine, recorder: Recorder) -> Iterator[TestClient]:
    app = wire.app(tiny_path, engine, recorder=recorder)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield client


def without_unset(value: Any) -> Any:
    """The value as JSON, without the fields that are empty."""
    if isinstance(value, dict):
        fields = {name: without_unset(each) for name, each in value.items()}
        return {name: each for name, each in fields.items() if each not in (None, "", [], {})}
    return [without_unset(each) for each in value] if isinstance(value, list | tuple) else value


def some_of(value: object, names: Mapping[str, Any]) -> Json:
    found = {name: msgspec.to_builtins(getattr(value, name), str_keys=True) for name in names}
    return {name: without_unset(each) for name, each in found.items()}


@pytest.mark.parametrize("at", range(0, len(ROWS), BLOCK))
def test_a_body_asks_for(
    client: TestClient, engine: ScriptedEngine, recorder: Recorder, tiny_path: Path, at: int
) -> None:
    tokenizer, wrong = Tokenizer(tiny_path / "tokenizer.json"), list[Any]()
    for row in ROWS[at : at + BLOCK]:
        answer = client.post(row["to"], json={**BODIES[row["to"]], **row["set"]})
        assert answer.status_code == 200, (row, answer.text)
        assert recorder.request
        (prompt,) = recorder.request.prompts
        found: Json = {
            **{name: row[name] for name in ("case", "to", "set") if name in row},
            "request": some_of(recorder.request, row.get("request", {})),
            "conversation": some_of(prompt, row.get("conversation", {})),
            "ignored": answer.headers.get("x-mlx-server-ignored", ""),
        }
        if row.get("prompt", "") in tokenizer.raw(engine.taken[-1].prompt):
            found["prompt"] = row.get("prompt", "")
        if without_unset(found) != without_unset(row):
            wrong.append((row, found))
    assert wrong == []


class Item(BaseModel):
    name: str
    tags: list[str] = []


class Order(BaseModel):
    items: list[Item]
    note: str | None


def test_a_pydantic_model_is_a_strict_format(client: TestClient, recorder: Recorder) -> None:
    """As OpenAI's client sends it, which finds no JSON in the engine's text."""
    sdk = OpenAI(base_url="http://localhost/v1", api_key="none", http_client=client)
    messages: Any = [HI]
    with suppress(ValidationError):
        sdk.chat.completions.parse(model=MODEL, messages=messages, response_format=Order)
    assert recorder.request
    format = recorder.request.format
    assert isinstance(format, JsonFormat)
    assert (format.name, format.strict) == ("Order", True)
    assert isinstance(format.schema, dict)
    items = {"items": {"$ref": "#/$defs/Item"}, "title": "Items", "type": "array"}
    assert format.schema["properties"]["items"] == items


FILE, CALLS = [{"type": "file", "file": 0}] * 1000, [0] * 1000


@pytest.mark.parametrize(
    ("wire_type", "wrong"),
    [
        *((ChatBody, {name: [0] * 1000}) for name in ("messages", "tools", "modalities", "stop")),
        (ChatBody, {"logit_bias": {str(token): "x" for token in range(1000)}}),
        (ChatBody, {"messages": [{"role": "user", "content": FILE}] * 1000}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": CALLS}] * 1000}),
        *(
            (CompletionBody, {"prompt": [prompt, *[value] * 500, None]})
            for prompt in ("a", [1])
            for value in (0, [0], "0")
        ),
    ],
)
def test_of_many_wrong_items_few_are_reported(wire_type: type[WireModel], wrong: Json) -> None:
    """Each report takes some 500 bytes, and a body can hold eight million wrong items."""
    with pytest.raises(ValidationError) as caught:
        wire_type.model_validate({**MESSAGES, "prompt": "a", **wrong})
    assert caught.value.error_count() < 10


class Echo(WireModel):
    text: str


def post(content: dict[str, Any]) -> httpx.Response:
    app = FastAPI()
    app.state.picture_hosts = frozenset()
    errors.install(app)

    @app.post("/echo")
    async def echo(http: Request) -> list[Any]:
        body = await handlers.read(http, Echo)
        # starlette would keep the bytes in `_body` until a stream has ended
        return [len(body.text), any(isinstance(held, bytes) for held in vars(http).values())]

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return await client.post("/echo", json=content)

    return asyncio.run(answer())


def test_only_large_bodies_are_parsed_in_a_thread_and_none_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the first of a type, which builds its validator."""
    sizes: list[int] = []

    async def watched(function: Callable[..., Any], raw: bytes, wire_type: type[Any]) -> Any:
        sizes.append(len(raw))
        return await in_thread(function, raw, wire_type)

    monkeypatch.setattr(handlers, "in_thread", watched)
    post({"text": "x"})
    sizes.clear()
    assert (post({"text": "x"}).json(), sizes) == ([1, False], [])
    assert post({"text": "x" * SMALL_BYTES}).json() == [SMALL_BYTES, False]
    assert len(sizes) == 1


@pytest.mark.parametrize("padding", [0, SMALL_BYTES])
def test_what_is_wrong_is_said_from_either_place(padding: int) -> None:
    answer = post({"text": 5, "padding": "x" * padding})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text")


@cases
def test_the_path_that_was_meant(asked: str, served: str) -> None:
    assert served_path(asked) == served


def test_no_route_is_hidden_and_all_of_v1_is_found_without_it() -> None:
    paths = {path for _, path in routes()}
    assert {served_path(path) for path in paths} == paths
    below = {path.split("/")[2] for path in paths if path.startswith("/v1/")}
    assert below - {"pool", "adapters"} == VERSIONED


@pytest.mark.slow
def test_head_asks_whether_the_server_answers(client: TestClient) -> None:
    paths = {path for methods, path in routes() if "GET" in methods and "{" not in path}
    for path in paths | {"//models/", f"/v1/models/{wire.MODEL}", "/v1/responses"}:
        asked = client.head(path)
        assert not asked.content
        if path != "/page/events":  # it has no end
            assert asked.status_code == client.get(path).status_code


def test_every_client_s_way_to_answer(client: TestClient) -> None:
    chat = {"model": wire.MODEL, "messages": [{"role": "user", "content": "a"}]}
    assert wire.ok(client.post("/chat/completions", json=chat))["object"] == "chat.completion"
    assert wire.ok(client.post("/v1/v1/messages", json=BODY))["type"] == "message"
    assert wire.ok(client.get("/models"))["data"]
    assert wire.ok(client.get("/v1/api/tags"))["models"]
    assert client.post("/v1/v1/messages", json={}).json()["type"] == "error", "in Anthropic's form"
    with suppress(*wire.CANCELLED), client.websocket_connect("ws://localhost/responses") as socket:
        socket.send_text("{")
        assert socket.receive_json()["type"] == "error"


def test_keys_are_asked_for_all_the_same(tiny_path: Path) -> None:
    with wire.client(tiny_path, wire.ScriptedEngine(), api_keys=(wire.key("key"),)) as client:
        for path in ("/models", "/v1/v1/models", "/v1/api/tags"):
            assert client.get(path).status_code == 401
