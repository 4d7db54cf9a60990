"""Requests to Ollama's routes, and what comes back, read by the types of its own client."""

import json
from collections.abc import Mapping
from typing import Any

import httpx2
from ollama import ChatResponse, GenerateResponse
from pydantic import BaseModel
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.wire import Json, as_json

CHAT, GENERATE = "/api/chat", "/api/generate"
HI: Json = {"role": "user", "content": "hi"}
BODIES: Mapping[str, Json] = {
    CHAT: {"model": wire.MODEL, "messages": [HI]},
    GENERATE: {"model": wire.MODEL, "prompt": "hi"},
}
TYPES: Mapping[str, type[BaseModel]] = {CHAT: ChatResponse, GENERATE: GenerateResponse}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def post(client: TestClient, path: str, **asked: Any) -> httpx2.Response:
    return client.post(path, json={**BODIES[path], **asked})


def whole(client: TestClient, path: str, **asked: Any) -> Json:
    return checked(path, wire.ok(post(client, path, stream=False, **asked)))


def streamed(client: TestClient, path: str, **asked: Any) -> list[Json]:
    return lines(path, post(client, path, **asked))


def lines(path: str, response: httpx2.Response) -> list[Json]:
    """The chunks of a stream, of which only the last one is done."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    found = [checked(path, json.loads(line)) for line in response.text.splitlines()]
    assert [chunk["done"] for chunk in found] == [False] * (len(found) - 1) + [True]
    return found


def checked(path: str, body: Json) -> Json:
    TYPES[path].model_validate(body, strict=True)
    if body["done"]:
        assert all(body[name] >= 0 for name in DURATIONS if name in body)
    return body


def refused(response: httpx2.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    body = as_json(response)
    assert body.keys() == {"error"}
    said = body["error"]
    assert isinstance(said, str)
    assert said
    return said


def content(path: str, chunk: Json) -> str:
    text: str = chunk["message"]["content"] if path == CHAT else chunk["response"]
    return text
