import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import httpx
import pydantic
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from mlx_server.errors import BadRequest, ModelNotFound, Overloaded
from mlx_server.http.errors import error_response, install
from mlx_server.http.security import SecurityMiddleware

PAGE = "https://page.example"


class Text(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Image(BaseModel):
    type: Literal["image_url"]
    image_url: dict[str, str]


class ToolFunction(BaseModel):
    name: str


class Tool(BaseModel):
    type: Literal["function"]
    function: ToolFunction


class Search(BaseModel):
    type: Literal["search"]
    search: str
    limit: int


def _kind(tool: Any) -> str:
    return str(tool["type"])


class Message(BaseModel):
    role: str
    content: str | list[Annotated[Text | Image, Field(discriminator="type")]]


class Chat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[Message] = []
    temperature: float = Field(1, le=2)
    stop: str | list[str] | None = None
    metadata: dict[str, str] = {}
    tools: list[
        Annotated[
            Annotated[Tool, Tag("function")] | Annotated[Search, Tag("search")],
            Discriminator(_kind),
        ]
    ] = []

    @pydantic.field_validator("metadata")
    @classmethod
    def _few(cls, metadata: dict[str, str]) -> dict[str, str]:
        if len(metadata) > 1:
            raise ValueError("at most one entry")
        return metadata


def an_app() -> FastAPI:
    app = FastAPI()
    install(app)
    origins = [PAGE]
    app.add_middleware(
        SecurityMiddleware,
        allowed_hosts=(),
        allowed_origins=origins,
        max_body_bytes=1 << 20,
        bound_host="127.0.0.1",
    )

    @app.get("/v1/raise/{what}")
    async def raises(what: str) -> None:
        raise RAISED[what]

    @app.post("/v1/body")
    async def reads_body(body: Chat, limit: int = 1) -> None: ...

    @app.get("/v1/cut")
    async def cut() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            raise ZeroDivisionError

        return StreamingResponse(parts())

    return app


def _validation_error() -> pydantic.ValidationError:
    with pytest.raises(pydantic.ValidationError) as caught:
        Chat.model_validate({"stop": ["a", 5]})
    return caught.value


RAISED: dict[str, Exception] = {
    "model": ModelNotFound("no such model", param="model"),
    "overloaded": Overloaded("full"),
    "bug": ZeroDivisionError("a secret"),
    "invalid": _validation_error(),
    "teapot": HTTPException(418, "short and stout"),
    "gone": HTTPException(404, "no such response"),
    "gateway": HTTPException(502, headers={"x-more": "1"}),
    "surrogate": BadRequest("\ud800"),
}


def ask(method: str, path: str, **request: Any) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=an_app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **request)

    return asyncio.run(answer())


@pytest.mark.parametrize(
    ("what", "status", "error"),
    [
        ("model", 404, ("no such model", "invalid_request_error", "model", "model_not_found")),
        ("overloaded", 503, ("full", "server_error", None, "overloaded")),
        ("teapot", 418, ("short and stout", "invalid_request_error", None, None)),
        ("gone", 404, ("no such response", "invalid_request_error", None, "not_found")),
        ("gateway", 502, ("Bad Gateway", "server_error", None, None)),
        ("surrogate", 400, ("\ud800", "invalid_request_error", None, None)),
        (
            "invalid",
            400,
            ("`stop`: should be a string", "invalid_request_error", "stop", None),
        ),
    ],
)
def test_every_error_has_openais_body(what: str, status: int, error: tuple[Any, ...]) -> None:
    answer = ask("GET", f"/v1/raise/{what}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert "x-request-id" in answer.headers
    keys = ("message", "type", "param", "code")
    assert json.loads(answer.content) == {"error": dict(zip(keys, error, strict=True))}


def test_headers_of_errors_are_kept() -> None:
    assert ask("GET", "/v1/raise/overloaded").headers["retry-after"] == "1"
    assert ask("GET", "/v1/raise/gateway").headers["x-more"] == "1"
    response = error_response(
        Overloaded("full"),
        {"type": "http", "headers": []},
        status=529,
        headers={"Retry-After": "7"},
    )
    assert (response.status_code, response.headers["retry-after"]) == (529, "7")


def test_a_bug_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask("GET", "/v1/raise/bug", headers={"origin": PAGE, "x-request-id": "mine"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["connection"] == "close"
    [record] = [record for record in caplog.records if record.name == "mlx_server"]
    assert record.levelno == logging.ERROR
    assert "mine" in record.getMessage()
    assert record.exc_info
    assert record.exc_info[0] is ZeroDivisionError


def test_a_bug_after_the_answer_began_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask("GET", "/v1/cut")
    assert (answer.status_code, answer.text) == (200, "begun")
    assert [record.name for record in caplog.records] == ["mlx_server"]


def test_a_client_that_leaves_early_is_no_bug_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = FastAPI()
    install(app)

    @app.post("/")
    async def reads(request: Request) -> None:
        await request.body()

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 400
    assert caplog.records == []
