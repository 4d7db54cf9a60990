"""Every error leaves as a body in OpenAI's form, and a bug without its details. What is said of
wrong values is in tests/api/refusals.jsonl."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from mlx_server.errors import BadRequest, ModelNotFound, Overloaded
from mlx_server.http.errors import error_response, install
from mlx_server.http.security import SecurityMiddleware
from tests.tables import cases

PAGE = "https://page.example"
RAISED: dict[str, Exception] = {
    "model": ModelNotFound("no such model", param="model"),
    "overloaded": Overloaded("full"),
    "bug": ZeroDivisionError("a secret"),
    "teapot": HTTPException(418, "short and stout"),
    "gone": HTTPException(404, "no such response"),
    "gateway": HTTPException(502, headers={"x-more": "1"}),
    "surrogate": BadRequest("\ud800"),
}


def raising() -> FastAPI:
    app = FastAPI()
    install(app)
    app.add_middleware(
        SecurityMiddleware,
        allowed_hosts=(),
        allowed_origins=[PAGE],
        max_body_bytes=1 << 20,
        bound_host="127.0.0.1",
    )

    @app.get("/v1/raise/{what}")
    async def raises(what: str) -> None:
        raise RAISED[what]

    @app.get("/v1/cut")
    async def cut() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            raise ZeroDivisionError

        return StreamingResponse(parts())

    @app.post("/")
    async def reads(request: Request) -> None:
        await request.body()

    return app


def ask(path: str, **request: Any) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=raising(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path, **request)

    return asyncio.run(answer())


@cases
def test_every_error_has_openais_body(what: str, status: int, error: list[Any]) -> None:
    answer = ask(f"/v1/raise/{what}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert "x-request-id" in answer.headers
    keys = ("message", "type", "param", "code")
    assert json.loads(answer.content) == {"error": dict(zip(keys, error, strict=True))}


def test_headers_of_errors_are_kept() -> None:
    assert ask("/v1/raise/overloaded").headers["retry-after"] == "1"
    assert ask("/v1/raise/gateway").headers["x-more"] == "1"
    scope: dict[str, Any] = {"type": "http", "headers": []}
    response = error_response(Overloaded("full"), scope, status=529, headers={"Retry-After": "7"})
    assert (response.status_code, response.headers["retry-after"]) == (529, "7")


def test_a_bug_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask("/v1/raise/bug", headers={"origin": PAGE, "x-request-id": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["connection"] == "close"
    [record] = [record for record in caplog.records if record.name == "mlx_server"]
    assert (record.levelno, "mine" in record.getMessage()) == (logging.ERROR, True)
    assert record.exc_info
    assert record.exc_info[0] is ZeroDivisionError


def test_a_client_that_leaves_early_is_no_bug_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
    asyncio.run(raising()(scope, receive, send))
    assert sent[0]["status"] == 400
    assert caplog.records == []
