"""Requests to a server of replay models, and its answers, whole or streamed."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from tests.contract.answers import Answer, Completion, NotAnswered, asked
from tests.live.server import PLAIN, LiveServer


def body(model: str, text: str = "Well?", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 120, **more}


def run(server: LiveServer, ask: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    async def with_client() -> Any:
        async with httpx.AsyncClient(**PLAIN, base_url=server.url, timeout=60) as http:
            return await ask(http)

    return asyncio.run(with_client())


def answered(server: LiveServer, asking: dict[str, Any]) -> tuple[Answer, Completion]:
    found: Completion = run(server, lambda http: asked(http, asking))
    (answer,) = found.answers
    return answer, found


def refused(server: LiveServer, asking: dict[str, Any]) -> NotAnswered:
    with pytest.raises(NotAnswered) as caught:
        run(server, lambda http: asked(http, asking))
    return caught.value
