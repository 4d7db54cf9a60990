"""Bodies: validated alike on the event loop and, where they are large, off it."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from mlx_server.api import handlers
from mlx_server.api.fields import WireModel
from mlx_server.http import errors
from mlx_server.request_threads import in_thread


class Echo(WireModel):
    text: str


def post(content: dict[str, Any]) -> httpx.Response:
    app = FastAPI()
    errors.install(app)

    @app.post("/echo")
    async def echo(http: Request) -> int:
        return len((await handlers.read(http, Echo)).text)

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return await client.post("/echo", json=content)

    return asyncio.run(answer())


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that were handed to a thread."""
    sizes: list[int] = []

    async def watched(function: Callable[..., Any], raw: bytes, wire_type: type[Any]) -> Any:
        sizes.append(len(raw))
        return await in_thread(function, raw, wire_type)

    monkeypatch.setattr(handlers, "in_thread", watched)
    return sizes


def test_only_large_bodies_are_parsed_in_a_thread(threads: list[int]) -> None:
    """And the first of a type, which builds its validator."""
    post({"text": "x"})
    threads.clear()
    assert post({"text": "x"}).json() == 1
    assert threads == []
    assert post({"text": "x" * handlers.LARGE_BYTES}).json() == handlers.LARGE_BYTES
    assert len(threads) == 1


@pytest.mark.parametrize("padding", [0, handlers.LARGE_BYTES])
def test_what_is_wrong_is_said_from_either_place(padding: int) -> None:
    answer = post({"text": 5, "padding": "x" * padding})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text"


def test_the_bytes_of_a_body_are_not_kept_for_its_answer() -> None:
    """As starlette does in `_body`, until a stream has ended."""
    app, kept = FastAPI(), list[bool]()

    @app.post("/echo")
    async def echo(http: Request) -> None:
        await handlers.read(http, Echo)
        kept.append(any(isinstance(held, bytes) for held in vars(http).values()))

    async def send() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            await client.post("/echo", json={"text": "x"})

    asyncio.run(send())
    assert kept == [False]
