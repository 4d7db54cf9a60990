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

from mlx_server.api.errors import Loc, error_response, install, param_of, validation_error
from mlx_server.api.security import SecurityMiddleware
from mlx_server.errors import BadRequest, ModelNotFound, Overloaded

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


def wrong(body: Any) -> BadRequest:
    with pytest.raises(pydantic.ValidationError) as caught:
        Chat.model_validate(body)
    return validation_error(caught.value, body)


def with_content(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"stop": 5}, "stop", "valid string"),
        ({"stop": ["a", 5]}, "stop[1]", "valid string"),
        ({"str": 5}, "str", "Extra inputs"),
        ({"messages": {}}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Field required"),
        (with_content(None), "messages[0].content", "valid string"),
        (with_content([5]), "messages[0].content[0]", "valid dictionary"),
        (with_content([{}]), "messages[0].content[0]", "type"),
        (with_content([{"type": "text"}]), "messages[0].content[0].text", "Field required"),
        (
            with_content([{"type": "text", "text": 5}]),
            "messages[0].content[0].text",
            "valid string",
        ),
        (
            with_content([{"type": "text", "text": "a", "bogus": 1}]),
            "messages[0].content[0].bogus",
            "Extra inputs",
        ),
        (
            with_content([{"type": "image_url", "image_url": {"url": 5}}]),
            "messages[0].content[0].image_url.url",
            "valid string",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "Field required"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
            "Field required",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": 5}}]},
            "tools[0].function.name",
            "valid string",
        ),
        ({"tools": [{"type": "search", "search": "q"}]}, "tools[0].limit", "Field required"),
        ({"metadata": {"int": 5}}, "metadata.int", "valid string"),
        ({"temperature": 3, "metadata": {"a": 1}}, "temperature", "less than"),
        ({"metadata": {"a": "", "b": ""}}, "metadata", "at most one entry"),
    ],
)
def test_a_wrong_body_is_told_by_its_parameter(body: Any, param: str, says: str) -> None:
    error = wrong(body)
    assert error.param == param
    assert error.message.startswith(f"`{param}`: ")
    assert says in error.message
    assert "Value error" not in error.message


def test_a_body_that_is_no_object_has_no_parameter() -> None:
    error = wrong([1])
    assert error.param is None
    assert error.message == "Input should be a valid dictionary or instance of Chat"


def test_messages_do_not_repeat_the_value() -> None:
    secret = "s" * 50
    for body in (
        {"temperature": secret},
        {"stop": {secret: 1}},
        with_content([{"type": secret}]),
        {"tools": [{"type": secret}]},
    ):
        assert secret not in wrong(body).message


def test_messages_and_parameters_stay_short() -> None:
    error = wrong({"k" * 5000: 1})
    assert error.param == "k" * 200
    assert len(error.message) <= 300

    class Wordy(BaseModel):
        choice: Literal["a" * 200, "b" * 200]  # type: ignore[valid-type]

    with pytest.raises(pydantic.ValidationError) as caught:
        Wordy.model_validate({"choice": ""})
    assert len(validation_error(caught.value, {"choice": ""}).message) == 300


@pytest.mark.parametrize(
    ("loc", "param"),
    [
        ((), ""),
        (("stop",), "stop"),
        (("messages", 0, "content"), "messages[0].content"),
        (
            ("messages", 0, "function-after[check(), Message]", "content", "str"),
            "messages[0].content",
        ),
        (
            ("messages", 0, "content", "list[union[Text,Image]]", 1, "text"),
            "messages[0].content[1].text",
        ),
        (("tools", 2, "Tool", "function", "name"), "tools[2].function.name"),
        (("stop", "list[str]", 3), "stop[3]"),
        (("tool_choice", "literal['none','auto']"), "tool_choice"),
        (("logit_bias", "50256", "[key]"), "logit_bias"),
        (("input", 0, 1), "input[0][1]"),
    ],
)
def test_param_of_drops_what_looks_like_no_field(loc: Loc, param: str) -> None:
    assert param_of(loc) == param


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
            ("`stop`: Input should be a valid string", "invalid_request_error", "stop", None),
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


def test_an_unknown_route() -> None:
    answer = ask("POST", "/chat/completions")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert "`POST /chat/completions`" in answer.json()["error"]["message"]
    assert "`/v1`" in answer.json()["error"]["message"]
    assert len(ask("GET", "/" + "x" * 1000).json()["error"]["message"]) < 300


def test_a_wrong_method() -> None:
    answer = ask("DELETE", "/v1/body")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("query", "body", "param"),
    [
        ("", '{"stop": 5}', "stop"),
        ("", '{"temperature": "x"}', "temperature"),
        ("", "{", None),
        ("", "", None),
        ("?limit=x", "{}", "limit"),
    ],
)
def test_what_fastapi_validates_itself(query: str, body: str, param: str | None) -> None:
    headers = {"content-type": "application/json"}
    answer = ask("POST", f"/v1/body{query}", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_body_over_the_limit_is_413_where_fastapi_reads_it() -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * (1 << 19)

    headers = {"content-type": "application/json"}
    answer = ask("POST", "/v1/body", content=content(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


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
