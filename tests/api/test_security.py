import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server.api.errors import install
from mlx_server.api.security import SecurityMiddleware, authorise
from mlx_server.api.strict_json import parse_object
from mlx_server.errors import SettingsError, TooLarge

HOST = ("host", "localhost:8000")
JSON = ("content-type", "application/json")
PAGE = "https://page.example"
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


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost:1",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.8.9.10:80",
        "[::1]",
        "[::1]:8000",
        "[0:0:0:0:0:0:0:1]:8000",
        "mybox.lan",
        "MyBox.LAN:9999",
        "proxied",
        "10.1.2.3:8000",
        "[fe80::1]",
    ],
)
def test_hosts_that_may_use_the_server(host: str) -> None:
    inner = Inner()
    hosts = ["MYBOX.lan", "proxied:8443", "10.1.2.3", "fe80::1"]
    assert call(a_gate(inner, hosts=hosts), ("host", host)).status == 200
    assert len(inner.scopes) == 1


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [""],
        ["localhost", "localhost"],
        ["localhost", "evil.com"],
        ["evil.com"],
        ["evil.com:8000"],
        ["localhost.evil.com"],
        ["127.0.0.1.evil.com"],
        ["evil.com.mybox.lan"],
        ["mybox.lan.evil.com"],
        ["localhost."],
        ["localhost.:8000"],
        ["127.0.0.1."],
        ["localhost:"],
        ["localhost:80:80"],
        ["localhost:http"],
        ["localhost:-1"],
        ["user@localhost"],
        ["evil.com@localhost"],
        ["localhost@evil.com"],
        ["localhost evil.com"],
        [" localhost"],
        ["localhost "],
        ["localhost\t"],
        ["localhost,evil.com"],
        ["localhost/"],
        ["localhost#"],
        ["localhost\\evil.com"],
        ["http://localhost"],
        ["löcalhost"],
        ["localhost\u00a0"],
        ["0x7f.0.0.1"],
        ["0x7f000001"],
        ["2130706433"],
        ["0177.0.0.1"],
        ["127.000.000.001"],
        ["127.1"],
        ["127.0.0.1.1"],
        ["128.0.0.1"],
        ["0.0.0.0"],
        ["192.168.1.5"],
        ["[::1"],
        ["::1"],
        ["::1]"],
        ["[::1]]"],
        ["[::1]x"],
        ["[::1%lo]"],
        ["[127.0.0.1]"],
        ["[::2]"],
        ["[::ffff:10.0.0.1]"],
        ["*"],
        ["."],
        ["a..b"],
    ],
)
def test_hosts_that_may_not(hosts: list[str]) -> None:
    inner = Inner()
    app = a_gate(inner, hosts=["mybox.lan"])
    answer = call(app, *(("host", host) for host in hosts), chunks=())
    assert answer.status == 403
    expected = "server.allowed_hosts" if len(hosts) == 1 else "exactly one Host"
    assert expected in answer.error["message"]
    assert answer.error["code"] == "forbidden"
    assert answer.headers["x-request-id"].startswith("req_")
    assert inner.scopes == []


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("192.168.1.5", "192.168.1.5:8000", 200),
        ("192.168.1.5", "192.168.1.6", 200),
        ("0.0.0.0", "10.0.0.7:8000", 200),
        ("0.0.0.0", "[fe80::1]:8000", 200),
        ("0.0.0.0", "0.0.0.0:8000", 200),
        ("0.0.0.0", "localhost", 200),
        ("0.0.0.0", "evil.com", 403),
        ("0.0.0.0", "10.1", 403),
        ("::", "10.0.0.7", 200),
        ("::", "evil.com", 403),
        ("", "10.0.0.7", 200),
        ("mybox.lan", "mybox.lan:8000", 200),
        ("mybox.lan", "other.lan", 403),
        ("::1", "10.0.0.7", 403),
        ("127.0.0.2", "10.0.0.7", 403),
        ("localhost", "10.0.0.7", 403),
    ],
)
def test_the_bound_address_widens_what_a_host_may_be(bound: str, host: str, status: int) -> None:
    assert call(a_gate(Inner(), bound=bound), ("host", host)).status == status


def test_a_long_host_is_not_repeated_whole() -> None:
    answer = call(a_gate(Inner()), ("host", "e" * 5000))
    assert answer.status == 403
    assert len(answer.error["message"]) < 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 200),
        ([("origin", "http://localhost:8000")], 200),
        ([("origin", "HTTP://LOCALHOST:8000")], 200),
        ([("origin", "https://localhost:8000")], 403),
        ([("origin", "http://localhost")], 403),
        ([("origin", "http://localhost:3000")], 403),
        ([("origin", "http://127.0.0.1:8000")], 403),
        ([("origin", "http://localhost:8000.evil.com")], 403),
        ([("origin", "http://evil.com")], 403),
        ([("origin", "null")], 403),
        ([("origin", "")], 403),
        ([("origin", "*")], 403),
        ([("origin", PAGE)], 200),
        ([("origin", f"{PAGE}:444")], 403),
        ([("origin", f"{PAGE}/")], 403),
        ([("origin", "http://page.example")], 403),
        ([("origin", "https://sub.page.example")], 403),
        ([("origin", "tauri://localhost")], 200),
        ([("origin", PAGE), ("origin", "http://evil.com")], 403),
        ([("origin", "http://localhost:8000"), ("origin", PAGE)], 403),
        ([("origin", PAGE), ("sec-fetch-site", "cross-site")], 200),
        ([("sec-fetch-site", "cross-site")], 403),
        ([("sec-fetch-site", "Cross-Site")], 403),
        ([("sec-fetch-site", "same-site")], 403),
        ([("sec-fetch-site", "none"), ("sec-fetch-site", "cross-site")], 403),
        ([("sec-fetch-site", "same-origin")], 200),
        ([("sec-fetch-site", "none")], 200),
    ],
)
def test_origins(headers: list[Header], status: int) -> None:
    inner = Inner()
    app = a_gate(inner, origins=["https://PAGE.example:443/", "tauri://localhost"])
    answer = call(app, HOST, *headers)
    assert answer.status == status
    assert len(inner.scopes) == (status == 200)
    if status == 403:
        assert "server.allowed_origins" in answer.error["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_an_allowed_page_may_read_the_answer() -> None:
    headers = call(a_gate(Inner(), origins=[PAGE]), HOST, ("origin", PAGE)).headers
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["vary"] == "Origin"
    assert headers["access-control-expose-headers"] == (
        "x-request-id, x-mlx-server-ignored, retry-after"
    )
    assert "access-control-allow-credentials" not in headers


def test_an_allowed_page_may_read_a_refusal_too() -> None:
    app = a_gate(Inner(), origins=[PAGE])
    answer = call(app, HOST, ("origin", PAGE), ("content-length", "2"), method="POST")
    assert answer.status == 415
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_vary_of_the_app_is_kept() -> None:
    async def varies(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"vary", b"Accept")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    answer = call(a_gate(varies, origins=[PAGE]), HOST, ("origin", PAGE))
    assert answer.headers["vary"] == "Accept, Origin"


@pytest.mark.parametrize("headers", [[], [("origin", "http://localhost:8000")]])
def test_without_another_page_there_is_no_cors(headers: list[Header]) -> None:
    answer = call(a_gate(Inner(), origins=[PAGE]), HOST, *headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:8000"])
def test_the_owner_may_allow_every_page(origin: str) -> None:
    answer = call(a_gate(Inner(), origins=["*"]), HOST, ("origin", origin))
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "*"


def test_every_page_includes_images_of_other_sites() -> None:
    app = a_gate(Inner(), origins=["*"])
    assert call(app, HOST, ("sec-fetch-site", "cross-site")).status == 200


PREFLIGHT = [("access-control-request-method", "POST")]


def test_preflight_reflects_header_names_that_are_tokens() -> None:
    inner = Inner()
    wanted = "authorization, Content-Type,x-stainless-os, bad name, evil\x00, ,x-api-key"
    answer = call(
        a_gate(inner, origins=[PAGE]),
        HOST,
        ("origin", PAGE),
        ("access-control-request-headers", wanted),
        *PREFLIGHT,
        method="OPTIONS",
    )
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == (
        "authorization, Content-Type, x-stainless-os, x-api-key"
    )
    assert inner.scopes == []


def test_preflight_of_another_page_is_refused() -> None:
    app = a_gate(Inner(), origins=[PAGE])
    answer = call(app, HOST, ("origin", "http://evil.com"), *PREFLIGHT, method="OPTIONS")
    assert answer.status == 403


def test_options_that_is_no_preflight_reaches_the_app() -> None:
    inner = Inner()
    call(a_gate(inner, origins=[PAGE]), HOST, ("origin", PAGE), method="OPTIONS")
    call(a_gate(inner), HOST, *PREFLIGHT, method="OPTIONS")
    assert len(inner.scopes) == 2


@pytest.mark.parametrize("origin", ["page.example", "null", "https://*.example", "https://a/b", ""])
def test_an_origin_no_browser_would_send_is_a_wrong_setting(origin: str) -> None:
    with pytest.raises(SettingsError, match="allowed_origins"):
        a_gate(Inner(), origins=[origin])


@pytest.mark.parametrize("host", ["*", "http://mybox", "my box", ""])
def test_a_host_that_is_none_is_a_wrong_setting(host: str) -> None:
    with pytest.raises(SettingsError, match="allowed_hosts"):
        a_gate(Inner(), hosts=[host])


LENGTH = ("content-length", "2")
CHUNKED = ("transfer-encoding", "chunked")
BYTES = ("content-type", "application/octet-stream")


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", [], 200),
        ("POST", [], 200),
        ("DELETE", [], 200),
        ("POST", [("content-length", "0")], 200),
        ("POST", [("content-length", "0"), ("content-type", "text/plain")], 200),
        ("POST", [LENGTH, JSON], 200),
        ("POST", [CHUNKED, JSON], 200),
        ("POST", [LENGTH, ("content-type", "Application/JSON")], 200),
        ("POST", [LENGTH, ("content-type", "application/json; charset=utf-8")], 200),
        ("POST", [LENGTH, ("content-type", 'application/json;charset="UTF-8"')], 200),
        ("POST", [LENGTH, ("content-type", "application/json; profile=x")], 200),
        ("POST", [LENGTH, ("content-type", "application/json; charset=utf-16")], 415),
        ("POST", [LENGTH, ("content-type", "application/json; charset=latin-1")], 415),
        ("POST", [LENGTH, ("content-type", "application/json; charset=")], 415),
        ("POST", [LENGTH, ("content-type", "application/jsonp")], 415),
        ("POST", [LENGTH, ("content-type", "application/vnd.api+json")], 415),
        ("POST", [LENGTH, ("content-type", "text/plain")], 415),
        ("POST", [LENGTH, ("content-type", "text/plain; application/json")], 415),
        ("POST", [LENGTH, ("content-type", "application/x-www-form-urlencoded")], 415),
        ("POST", [LENGTH, ("content-type", "multipart/form-data; boundary=x")], 415),
        ("POST", [LENGTH, ("content-type", "")], 415),
        ("POST", [LENGTH], 200),
        ("POST", [CHUNKED], 200),
        ("POST", [LENGTH, BYTES], 200),
        ("POST", [LENGTH, BYTES, BYTES], 415),
        ("POST", [LENGTH, BYTES, ("origin", "http://localhost:8000")], 415),
        ("POST", [LENGTH, BYTES, ("sec-fetch-site", "same-origin")], 415),
        ("POST", [LENGTH, ("origin", "http://localhost:8000")], 415),
        ("POST", [LENGTH, ("sec-fetch-site", "same-origin")], 415),
        ("POST", [CHUNKED, ("sec-fetch-site", "none")], 415),
        ("POST", [LENGTH, JSON, JSON], 415),
        ("POST", [LENGTH, JSON, ("content-type", "text/plain")], 415),
        ("GET", [LENGTH, ("content-type", "text/plain")], 415),
        ("DELETE", [LENGTH], 200),
        ("DELETE", [LENGTH, ("sec-fetch-site", "none")], 415),
        ("DELETE", [LENGTH, JSON], 200),
        ("POST", [LENGTH, JSON, ("content-encoding", "identity")], 200),
        ("POST", [LENGTH, JSON, ("content-encoding", "gzip")], 415),
        ("POST", [LENGTH, JSON, ("content-encoding", "identity, br")], 415),
        ("POST", [LENGTH, JSON, ("content-encoding", "identity"), ("content-encoding", "br")], 415),
        ("DELETE", [LENGTH, JSON, ("content-encoding", "zstd")], 415),
        ("POST", [("content-encoding", "gzip")], 415),
        ("GET", [("content-encoding", "gzip")], 200),
        ("POST", [("content-length", str(LIMIT)), JSON], 200),
        ("POST", [("content-length", str(LIMIT + 1)), JSON], 413),
        ("POST", [("content-length", str(LIMIT + 1)), ("content-type", "text/plain")], 413),
        ("POST", [("content-length", "9" * 1000), JSON], 413),
        ("POST", [("content-length", "9" * 10_000), JSON], 400),
        ("POST", [("content-length", "-1"), JSON], 400),
        ("POST", [("content-length", "+2"), JSON], 400),
        ("POST", [("content-length", "²"), JSON], 400),
        ("POST", [("content-length", "0x2"), JSON], 400),
        ("POST", [("content-length", ""), JSON], 400),
        ("POST", [LENGTH, ("content-length", "3"), JSON], 400),
    ],
)
def test_bodies(method: str, headers: list[Header], status: int) -> None:
    inner = Inner()
    chunks = [b"{}"] if status == 200 else []
    assert call(a_gate(inner), HOST, *headers, method=method, chunks=chunks).status == status
    assert len(inner.scopes) == (status == 200)


def test_a_body_of_unknown_length_is_counted_while_it_streams() -> None:
    inner = Inner()
    chunks = [b"x" * LIMIT, b"", b"x", b"never read"]
    answer = call(a_gate(inner), HOST, CHUNKED, JSON, method="POST", chunks=chunks)
    assert answer.status == 413
    assert "server.max_body_bytes" in answer.error["message"]
    assert inner.bodies == []


def test_a_streamed_body_may_fill_the_limit() -> None:
    inner = Inner()
    chunks = [b"x" * (LIMIT - 1), b"x", b""]
    assert call(a_gate(inner), HOST, CHUNKED, JSON, method="POST", chunks=chunks).status == 200
    assert inner.bodies == [b"x" * LIMIT]


def test_an_error_after_the_answer_began_is_left_to_the_server() -> None:
    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()

    chunks = [b"x" * (LIMIT + 1)]
    with pytest.raises(TooLarge):
        call(a_gate(late), HOST, CHUNKED, JSON, method="POST", chunks=chunks)


@pytest.mark.parametrize("sent", ["a", "My id: {1}~", "x" * 128])
def test_a_request_id_is_taken_over(sent: str) -> None:
    inner = Inner()
    answer = call(a_gate(inner), HOST, ("x-request-id", sent))
    assert answer.headers == {
        "x-own": "1",
        "x-request-id": sent,
    }
    assert inner.scopes[0]["state"]["request_id"] == sent


@pytest.mark.parametrize("sent", [[], [""], ["x" * 129], ["é"], ["a\tb"], ["a\x7f"], ["a", "b"]])
def test_a_request_id_is_made(sent: list[str]) -> None:
    inner = Inner()
    answer = call(a_gate(inner), HOST, *(("x-request-id", one) for one in sent))
    made = answer.headers["x-request-id"]
    assert made.startswith("req_")
    assert len(made) == len("req_") + 32
    assert inner.scopes[0]["state"]["request_id"] == made


def test_state_of_the_lifespan_is_kept() -> None:
    inner = Inner()
    call(a_gate(inner), HOST, state={"pool": 1})
    assert inner.scopes[0]["state"]["pool"] == 1


def test_a_refusal_has_the_clients_request_id() -> None:
    answer = call(a_gate(Inner()), ("x-request-id", "mine"))
    assert (answer.status, answer.headers["x-request-id"]) == (403, "mine")


def test_lifespan_passes() -> None:
    inner = Inner()
    call(a_gate(inner), type="lifespan")
    assert [scope["type"] for scope in inner.scopes] == ["lifespan"]


@pytest.mark.parametrize(
    "headers",
    [[("host", "evil.com")], [HOST, ("origin", "http://evil.com")], [HOST, ("origin", "null")]],
)
def test_websockets_are_refused_by_host_and_origin(headers: list[Header]) -> None:
    inner = Inner()
    closed = call(a_gate(inner), *headers, type="websocket", scheme="ws")
    assert closed.messages == [{"type": "websocket.close", "code": 1008}]
    extensions: dict[str, Any] = {"websocket.http.response": {}}
    denied = call(a_gate(inner), *headers, type="websocket", scheme="ws", extensions=extensions)
    assert denied.messages[0]["type"] == "websocket.http.response.start"
    assert denied.status == 403
    assert inner.scopes == []


@pytest.mark.parametrize(("scheme", "page"), [("ws", "http"), ("wss", "https")])
def test_websockets_of_our_own_pages_pass(scheme: str, page: str) -> None:
    inner = Inner()
    origin = ("origin", f"{page}://localhost:8000")
    call(a_gate(inner), HOST, origin, type="websocket", scheme=scheme)
    assert len(inner.scopes) == 1


def an_app(*keys: str) -> FastAPI:
    app = FastAPI()
    install(app)

    @app.post("/echo", dependencies=[Depends(authorise(keys))])
    async def echo(request: Request) -> dict[str, Any]:
        return parse_object(await request.body())

    return app


def post(app: FastAPI, **request: Any) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return await client.post("/echo", **request)

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
        ([("Authorization", "Bearer")], 401),
        ([("Authorization", "Bearer ")], 401),
        ([("Authorization", "one")], 401),
        ([("Authorization", "Basic one")], 401),
        ([("Authorization", "Bearer on")], 401),
        ([("Authorization", "Bearer onee")], 401),
        ([("Authorization", "Bearer ONE")], 401),
        ([("Authorization", b"Bearer \xff")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "one two")], 401),
    ],
)
def test_keys(headers: list[tuple[str, str | bytes]], status: int) -> None:
    answer = post(an_app("one", "two", "schlüssel"), headers=headers, json={})
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_without_keys_everyone_comes_in() -> None:
    assert post(an_app(), json={}).status_code == 200


def test_an_empty_key_lets_nobody_in() -> None:
    answer = post(an_app(""), json={}, headers={"x-api-key": ""})
    assert answer.status_code == 401


def test_a_body_that_is_no_json_object() -> None:
    for content in (b"[]", b"{", b""):
        headers = {"content-type": "application/json"}
        answer = post(an_app(), content=content, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"
