"""The security middleware around an app that keeps what it gets."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server.http.security import SecurityMiddleware

LIMIT = 100


Header = tuple[str, str]


@dataclass
class Answer:
    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def error(self) -> dict[str, Any]:
        body = b"".join(message["body"] for message in self.messages[1:])
        error: dict[str, Any] = json.loads(body)["error"]
        return error


@dataclass
class Inner:
    """An app that reads its whole body and answers 200; it keeps what it was called with."""

    scopes: list[Scope] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if self.failure:
            raise self.failure
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
        await send({"type": "http.response.body", "body": b"{}"})


def a_gate(
    app: ASGIApp,
    *,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    bound: str = "127.0.0.1",
) -> SecurityMiddleware:
    return SecurityMiddleware(
        app,
        allowed_hosts=list(hosts),
        allowed_origins=list(origins),
        max_body_bytes=LIMIT,
        bound_host=bound,
    )


def call(
    app: ASGIApp,
    *headers: Header,
    method: str = "GET",
    chunks: Iterable[bytes] = (b"",),
    **scope: Any,
) -> Answer:
    answer = Answer()
    left = list(chunks)

    async def receive() -> Message:
        assert left, "the body was read although it should not be"
        chunk = left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    async def send(message: Message) -> None:
        answer.messages.append(message)

    full: Scope = {
        "type": "http",
        "method": method,
        "scheme": "http",
        "path": "/",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
        **scope,
    }

    async def run() -> None:
        await app(full, receive, send)

    asyncio.run(run())
    return answer


HOST = ("host", "localhost:8000")
