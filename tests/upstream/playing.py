"""A server on loopback that plays what upstreams send, and the gateway in front of it."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any

import uvicorn
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, Settings, validated, values
from mlx_server.pool.pool import AnswerRecorder
from mlx_server.upstream.spec import UpstreamCapabilities, capabilities_of

Json = dict[str, Any]

SSE = {"content-type": "text/event-stream"}
USAGE: Json = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
KEY_VARIABLE, KEY = "TEST_UPSTREAM_KEY", "sk-secret-of-the-owner-1234567890"


@dataclass(frozen=True)
class Reply:
    chunks: tuple[bytes, ...] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: SSE)
    hangs: bool = False
    """Sends nothing after the chunks until the client leaves."""
    breaks: bool = False
    """Cuts the connection after the chunks."""
    endless: bool = False
    """Sends the last chunk again and again."""


def sse(*values: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(value)}\n\n" for value in values]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def delta(finish: str | None = None, **said: Any) -> Json:
    return {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}


def streamed(*values: Any, done: bool = True, **more: Any) -> Reply:
    return Reply((sse(*values, done=done),), **more)


def says(text: str, finish: str | None = "stop") -> Reply:
    return streamed(delta(content=text), delta(finish), USAGE)


def whole(value: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(
        (json.dumps(value).encode(),), status, {"content-type": "application/json", **headers}
    )


@dataclass(frozen=True)
class Asked:
    path: str
    headers: Mapping[str, str]
    raw: bytes
    port: int
    """Of the connection's other end."""

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class PlayingServer:
    """Plays replies in their order, and writes down what was asked. The last one is repeated."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.left = Event()
        """A client has left before the end of a reply."""
        self.models = Reply(status=404)
        """What it answers to GET /v1/models, which is not among `asked`."""
        self._replies: list[Reply] = []
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app, log_level="critical", lifespan="off", interface="asgi3", ws="none"
            )
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = Thread(target=self._server.run, args=([self._socket],), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def plays(self, *replies: Reply) -> None:
        self._replies = list(replies)
        self.asked.clear()
        self.left.clear()

    @property
    def bodies(self) -> list[Any]:
        return [asked.body for asked in self.asked]

    def bodies_of(self, path: str) -> list[Any]:
        return [asked.body for asked in self.asked if asked.path.startswith(path)]

    def __enter__(self) -> "PlayingServer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["method"] == "GET":
            await self._play(self.models, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path = scope["path"] + (
            f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        )
        self.asked.append(Asked(path, headers, body, scope["client"][1]))
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        await self._play(reply, receive, send)

    async def _play(self, reply: Reply, receive: Receive, send: Send) -> None:
        head = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": head})
        for chunk in reply.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        left = asyncio.create_task(self._until_left(receive))
        while reply.endless and not left.done():
            await send({"type": "http.response.body", "body": reply.chunks[-1], "more_body": True})
            await asyncio.sleep(0)
        if reply.hangs or reply.endless:
            await left
        left.cancel()
        if reply.breaks:
            raise ConnectionError("the test wants it so")
        await send({"type": "http.response.body", "body": b""})

    async def _until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


def settings(url: str, models: Mapping[str, Mapping[str, Any]]) -> Settings:
    """capabilities may have those that models.yaml can't set, as if the server had told them."""

    def entry(capabilities: Mapping[str, Any], **model: Any) -> ModelSettings:
        source = {"source": f"openai+{url}/v1", "upstream": {"retries": 0}, **model}
        settings = validated(ModelSettings, source)
        if not capabilities:
            return settings
        known = values(capabilities_of(settings.source))
        told = {**known, **capabilities, "stated": frozenset(capabilities)}
        return replace(settings, capabilities=UpstreamCapabilities(**told))

    return Settings(models={name: entry(**{"capabilities": {}, **m}) for name, m in models.items()})


@contextmanager
def gateway(
    url: str, models: Mapping[str, Mapping[str, Any]], recorder: AnswerRecorder | None = None
) -> Iterator[TestClient]:
    app = create_app(settings(url, models), recorder=recorder)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def chat(client: TestClient, text: str = "hi", *, model: str = "up", **more: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    return client.post("/v1/chat/completions", json=body)


def answered(client: TestClient, **more: Any) -> Json:
    response = chat(client, **more)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def events(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def joined(parts: Iterable[str | None]) -> str:
    return "".join(part or "" for part in parts)


AnswerReader = Callable[[TestClient, Json], Json]
"""Asks, and returns the answer as `fold` shows it."""


def in_one(client: TestClient, body: Json) -> Json:
    choice = (found := answered(client, **body))["choices"][0]
    message = choice["message"]
    return {
        "reasoning": message.get("reasoning_content") or "",
        "text": message["content"] or "",
        "calls": [_call(call["function"]) for call in message.get("tool_calls") or ()],
        "finish": choice["finish_reason"],
        **_warnings(found.get("mlx_server")),
    }


def in_chunks(client: TestClient, body: Json) -> Json:
    response = chat(client, stream=True, **body)
    assert response.status_code == 200, response.text
    chunks = list(events(response.text))
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    deltas = [choice["delta"] for choice in choices]
    calls: dict[int, Json] = {}
    for call in (call for each in deltas for call in each.get("tool_calls") or ()):
        known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
        for key in known:
            known[key] += call["function"].get(key) or ""
    found_reports = [chunk["mlx_server"] for chunk in chunks if chunk.get("mlx_server")]
    return {
        "reasoning": joined(each.get("reasoning_content") for each in deltas),
        "text": joined(each.get("content") for each in deltas),
        "calls": [_call(call) for call in calls.values()],
        "finish": choices[-1]["finish_reason"],
        **_warnings(found_reports[-1] if found_reports else None),
    }


def as_response(client: TestClient, body: Json) -> Json:
    tools = [{"type": "function", **tool["function"]} for tool in body.get("tools", ())]
    more = {"tools": tools} if tools else {}
    response = client.post(
        "/v1/responses", json={"model": body.get("model", "up"), "input": "hi", **more}
    )
    assert response.status_code == 200, response.text
    found = response.json()
    items = found["output"]
    calls = [_call(item) for item in items if item["type"] == "function_call"]
    ends = {"incomplete": "length", "completed": "tool_calls" if calls else "stop"}
    return {
        "reasoning": joined(
            part["text"]
            for item in items
            if item["type"] == "reasoning"
            for part in item["content"]
        ),
        "text": joined(
            part["text"] for item in items if item["type"] == "message" for part in item["content"]
        ),
        "calls": calls,
        "finish": ends[found["status"]],
        **_warnings(found.get("mlx_server")),
    }


STOP_REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def as_message(client: TestClient, body: Json) -> Json:
    """What a message has, in which no repairs are reported."""
    functions = [tool["function"] for tool in body.get("tools", ())]
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    model = body.get("model", "up")
    asked = {"model": model, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
    response = client.post("/v1/messages", json={**asked, "tools": tools})
    assert response.status_code == 200, response.text
    found = response.json()
    parts = found["content"]
    return {
        "reasoning": joined(part.get("thinking") for part in parts),
        "text": joined(part.get("text") for part in parts),
        "calls": [
            {"name": part["name"], "arguments": part["input"]}
            for part in parts
            if part["type"] == "tool_use"
        ],
        "finish": STOP_REASONS[found["stop_reason"]],
    }


def _call(call: Mapping[str, Any]) -> Json:
    return {"name": call["name"], "arguments": json.loads(call["arguments"])}


def _warnings(found: Mapping[str, Any] | None) -> Json:
    repairs = [f"{each['what']} {each['where']}" for each in (found or {}).get("repairs", ())]
    return {"repairs": repairs, "unmet": [e["what"] for e in (found or {}).get("unmet", ())]}


WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: Json = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
PARIS = {"name": "get_weather", "arguments": {"city": "Paris"}}
PARIS_JSON = '{"city": "Paris"}'
CALL_JSON = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def call(arguments: Any, name: str = "get_weather", **more: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": 0, "id": "call_1", "function": function, **more}]}


def indexed(index: Any, id: str | None = None, **function: Any) -> Json:
    """A piece of a call."""
    return {"tool_calls": [{"index": index, "id": id, "function": function}]}
