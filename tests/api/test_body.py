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
from mlx_server.request_threads import SMALL_BYTES, in_thread


class Echo(WireModel):
    text: str


def post(content: dict[str, Any]) -> httpx.Response:
    app = FastAPI()
    app.state.picture_hosts = frozenset()
    errors.install(app)

    @app.post("/echo")
    async def echo(http: Request) -> list[Any]:
        body = await handlers.read(http, Echo)
        # starlette would keep the bytes in `_body` until a stream has ended
        return [len(body.text), any(isinstance(held, bytes) for held in vars(http).values())]

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return await client.post("/echo", json=content)

    return asyncio.run(answer())


def test_only_large_bodies_are_parsed_in_a_thread_and_none_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the first of a type, which builds its validator."""
    sizes: list[int] = []

    async def watched(function: Callable[..., Any], raw: bytes, wire_type: type[Any]) -> Any:
        sizes.append(len(raw))
        return await in_thread(function, raw, wire_type)

    monkeypatch.setattr(handlers, "in_thread", watched)
    post({"text": "x"})
    sizes.clear()
    assert (post({"text": "x"}).json(), sizes) == ([1, False], [])
    assert post({"text": "x" * SMALL_BYTES}).json() == [SMALL_BYTES, False]
    assert len(sizes) == 1


@pytest.mark.parametrize("padding", [0, SMALL_BYTES])
def test_what_is_wrong_is_said_from_either_place(padding: int) -> None:
    answer = post({"text": 5, "padding": "x" * padding})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text")
