import asyncio
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request
from starlette.types import Receive, Scope, Send

from mlx_server.errors import TooLarge
from mlx_server.http.errors import install
from mlx_server.http.security import authorise
from mlx_server.http.strict_json import parse_object
from mlx_server.request_threads import client_of_request, in_thread
from tests.http.gate import HOST, LIMIT, Header, Inner, a_gate, call

JSON = ("content-type", "application/json")


LENGTH = ("content-length", "2")


CHUNKED = ("transfer-encoding", "chunked")


FORM = ("content-type", "application/x-www-form-urlencoded")
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
        ("POST", [LENGTH, FORM], 200),
        ("POST", [LENGTH, FORM, ("origin", "http://localhost:8000")], 415),
        ("POST", [LENGTH, FORM, ("sec-fetch-mode", "no-cors")], 415),
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


def test_the_threads_of_a_request_know_its_client() -> None:
    app = FastAPI(dependencies=[Depends(authorise(["a", "b"]))])

    @app.get("/")
    async def client(request: Request) -> list[str]:
        return [request.state.client, await in_thread(client_of_request.get)]

    async def ask(key: str) -> list[str]:
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            found: list[str] = (await http.get("/", headers=headers)).json()
        return found

    found = [asyncio.run(ask(key)) for key in "ab"]
    assert all(client == known != "" for client, known in found)
    assert found[0] != found[1]
