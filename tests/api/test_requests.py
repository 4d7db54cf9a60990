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
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.request_threads import SMALL_BYTES, in_thread
from mlx_server.requests import GenerateRequest, JsonFormat
from tests.api import wire
from tests.api.wire import MODEL, Json, ScriptedEngine

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
