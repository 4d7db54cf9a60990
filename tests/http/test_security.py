"""The security middleware around an app that keeps what it gets, and keys. What pages of others
send is in tests/hostile/test_web.py."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server.errors import SettingsError
from mlx_server.http.errors import install
from mlx_server.http.security import SecurityMiddleware, authorise
from mlx_server.http.strict_json import parse_object
from mlx_server.request_threads import client_of_request, in_thread
from tests.tables import cases

LIMIT = 100
PAGE = "https://page.example"
HOST = ("host", "localhost:8000")

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
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


def secured(
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
    answer, left = Answer(), list(chunks)

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


# Hosts

OURS = (
    "localhost localhost:8000 LocalHost:1 127.0.0.1 127.8.9.10:80 [::1] [::1]:8000 "
    "[0:0:0:0:0:0:0:1]:8000 mybox.lan MyBox.LAN:9999 proxied 10.1.2.3:8000 [fe80::1] "
    "host.docker.internal:8000 host.containers.internal gateway.docker.internal"
)


@pytest.mark.parametrize("host", OURS.split())
def test_hosts_that_may_use_the_server(host: str) -> None:
    hosts = ["MYBOX.lan", "proxied:8443", "10.1.2.3", "fe80::1"]
    assert call(secured(Inner(), hosts=hosts), ("host", host)).status == 200


@pytest.mark.parametrize(
    "hosts",
    [
        *([], ["localhost", "localhost"], ["localhost", "evil.com"]),
        *(["evil.com.mybox.lan"], ["mybox.lan.evil.com"], [" localhost"], ["localhost "]),
        *(["localhost\t"], ["localhost\u00a0"], ["128.0.0.1"], ["[::2]"], ["a..b"], ["."]),
        *(["host.example"], ["docker.internal.example"], ["xdocker.internal"], ["e" * 5000]),
    ],
)
def test_hosts_that_may_not(hosts: list[str]) -> None:
    inner = Inner()
    answer = call(
        secured(inner, hosts=["mybox.lan"]), *(("host", host) for host in hosts), chunks=()
    )
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    expected = "server.allowed_hosts" if len(hosts) == 1 else "exactly one Host"
    assert expected in answer.error["message"]
    assert len(answer.error["message"]) < 200
    assert answer.headers["x-request-id"].startswith("req_")
    assert inner.scopes == []


@cases
def test_the_bound_address_widens_what_a_host_may_be(bound: str, hosts: str, status: int) -> None:
    for host in hosts.split():
        assert call(secured(Inner(), bound=bound), ("host", host)).status == status, host


@pytest.mark.parametrize("host", ["*", "http://mybox", "my box", ""])
def test_a_host_that_is_none_is_a_wrong_setting(host: str) -> None:
    with pytest.raises(SettingsError, match="allowed_hosts"):
        secured(Inner(), hosts=[host])


# Origins


@cases
def test_origins(headers: list[Header], status: int) -> None:
    inner = Inner()
    app = secured(inner, origins=["https://PAGE.example:443/", "tauri://localhost"])
    answer = call(app, HOST, *headers)
    assert answer.status == status
    assert len(inner.scopes) == (status == 200)
    if status == 403:
        assert "server.allowed_origins" in answer.error["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_an_allowed_page_may_read_the_answer_and_a_refusal() -> None:
    app = secured(Inner(), origins=[PAGE])
    headers = call(app, HOST, ("origin", PAGE)).headers
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["vary"] == "Origin"
    assert headers["access-control-expose-headers"] == (
        "x-request-id, x-mlx-server-ignored, x-mlx-server-stream, retry-after"
    )
    assert "access-control-allow-credentials" not in headers
    refused = call(app, HOST, ("origin", PAGE), ("content-length", "2"), method="POST")
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (415, PAGE)
    assert "Only `POST /v1/files` takes files" in refused.error["message"]
    for own in ([], [("origin", "http://localhost:8000")]):
        answer = call(app, HOST, *own)
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_owner_may_allow_every_page() -> None:
    app = secured(Inner(), origins=["*"])
    for origin in (PAGE, "null", "http://localhost:8000"):
        answer = call(app, HOST, ("origin", origin))
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert call(app, HOST, ("sec-fetch-site", "cross-site")).status == 200


PREFLIGHT = ("access-control-request-method", "POST")


def test_preflight_reflects_header_names_that_are_tokens() -> None:
    inner = Inner()
    wanted = "authorization, Content-Type,x-stainless-os, bad name, evil\x00, ,x-api-key"
    asked = ("access-control-request-headers", wanted)
    app = secured(inner, origins=[PAGE])
    answer = call(app, HOST, ("origin", PAGE), asked, PREFLIGHT, method="OPTIONS")
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == (
        "authorization, Content-Type, x-stainless-os, x-api-key"
    )
    foreign = ("origin", "http://evil.com")
    assert call(app, HOST, foreign, PREFLIGHT, method="OPTIONS").status == 403
    assert inner.scopes == []
    call(app, HOST, ("origin", PAGE), method="OPTIONS")
    call(secured(inner), HOST, PREFLIGHT, method="OPTIONS")
    assert len(inner.scopes) == 2, "OPTIONS that is no preflight"


@pytest.mark.parametrize("origin", ["page.example", "null", "https://*.example", "https://a/b", ""])
def test_an_origin_no_browser_would_send_is_a_wrong_setting(origin: str) -> None:
    with pytest.raises(SettingsError, match="allowed_origins"):
        secured(Inner(), origins=[origin])


@pytest.mark.parametrize("headers", [[("host", "evil.com")], [HOST, ("origin", "null")]])
def test_websockets_are_refused_by_host_and_origin(headers: list[Header]) -> None:
    inner = Inner()
    closed = call(secured(inner), *headers, type="websocket", scheme="ws")
    assert closed.messages == [{"type": "websocket.close", "code": 1008}]
    extensions: dict[str, Any] = {"websocket.http.response": {}}
    denied = call(secured(inner), *headers, type="websocket", scheme="ws", extensions=extensions)
    assert denied.messages[0]["type"] == "websocket.http.response.start"
    assert (denied.status, inner.scopes) == (403, [])


@pytest.mark.parametrize(("scheme", "page"), [("ws", "http"), ("wss", "https")])
def test_websockets_of_our_own_pages_pass(scheme: str, page: str) -> None:
    inner = Inner()
    origin = ("origin", f"{page}://localhost:8000")
    call(secured(inner), HOST, origin, type="websocket", scheme=scheme)
    assert len(inner.scopes) == 1


# Bodies and ids

JSON = ("content-type", "application/json")
CHUNKED = ("transfer-encoding", "chunked")


@cases
def test_bodies(method: str, headers: list[Header], status: int) -> None:
    inner = Inner()
    chunks = [b"{}"] if status == 200 else []
    assert call(secured(inner), HOST, *headers, method=method, chunks=chunks).status == status
    assert len(inner.scopes) == (status == 200)


@pytest.mark.parametrize(("digits", "status"), [(1000, 413), (10_000, 400)])
def test_a_length_of_many_digits(digits: int, status: int) -> None:
    length = ("content-length", "9" * digits)
    assert call(secured(Inner()), HOST, length, JSON, method="POST", chunks=()).status == status


def test_a_body_of_unknown_length_is_counted_while_it_streams() -> None:
    inner = Inner()
    chunks = [b"x" * LIMIT, b"", b"x", b"never read"]
    answer = call(secured(inner), HOST, CHUNKED, JSON, method="POST", chunks=chunks)
    assert (answer.status, inner.bodies) == (413, [])
    assert "server.max_body_bytes" in answer.error["message"]
    chunks = [b"x" * (LIMIT - 1), b"x", b""]
    assert call(secured(inner), HOST, CHUNKED, JSON, method="POST", chunks=chunks).status == 200
    assert inner.bodies == [b"x" * LIMIT]


@pytest.mark.parametrize("sent", ["a", "My id: {1}~", "x" * 128])
def test_a_request_id_is_taken_over(sent: str) -> None:
    inner = Inner()
    answer = call(secured(inner), HOST, ("x-request-id", sent), state={"pool": 1})
    assert answer.headers == {"x-own": "1", "x-request-id": sent}
    state = inner.scopes[0]["state"]
    assert (state["request_id"], state["pool"]) == (sent, 1)


@pytest.mark.parametrize("sent", [[], [""], ["x" * 129], ["é"], ["a\tb"], ["a\x7f"], ["a", "b"]])
def test_a_request_id_is_made(sent: list[str]) -> None:
    inner = Inner()
    answer = call(secured(inner), HOST, *(("x-request-id", one) for one in sent))
    id = answer.headers["x-request-id"]
    assert (id[:4], len(id)) == ("req_", len("req_") + 32)
    assert inner.scopes[0]["state"]["request_id"] == id


def test_a_refusal_has_the_clients_request_id() -> None:
    answer = call(secured(Inner()), ("x-request-id", "mine"))
    assert (answer.status, answer.headers["x-request-id"]) == (403, "mine")


# Keys


def keyed(*keys: str) -> FastAPI:
    app = FastAPI()
    install(app)

    @app.post("/echo", dependencies=[Depends(authorise(keys))])
    async def echo(request: Request) -> dict[str, Any]:
        return parse_object(await request.body())

    @app.post("/client", dependencies=[Depends(authorise(keys))])
    async def client(request: Request) -> list[str]:
        return [request.state.client, await in_thread(client_of_request.get)]

    return app


def post(app: FastAPI, path: str = "/echo", **request: Any) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return await client.post(path, **request)

    return asyncio.run(answer())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", "Bearer one")], 200),
        ([("Authorization", "bearer   two ")], 200),
        ([("x-api-key", "two")], 200),
        ([("x-api-key", "wrong"), ("Authorization", "Bearer one")], 200),
        ([("Authorization", "Bearer schlüssel".encode())], 200),
        ([], 401),
        *(([("Authorization", each)], 401) for each in ("Bearer", "Bearer ", "one", "Basic one")),
        *(([("Authorization", f"Bearer {each}")], 401) for each in ("on", "onee", "ONE")),
        ([("Authorization", b"Bearer \xff")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "one two")], 401),
    ],
)
def test_keys(headers: list[tuple[str, str | bytes]], status: int) -> None:
    answer = post(keyed("one", "two", "schlüssel"), headers=headers, json={})
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_without_keys_everyone_comes_in_and_by_an_empty_one_nobody() -> None:
    assert post(keyed(), json={}).status_code == 200
    assert post(keyed(""), json={}, headers={"x-api-key": ""}).status_code == 401
