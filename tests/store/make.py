"""Responses to store, and tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import msgspec

from mlx_server.store import Item, Response

P = ParamSpec("P")
R = TypeVar("R")

HANG = 60


def finish(call: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(asyncio.wait_for(call, HANG))


def runs(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        finish(test(*args, **kwargs))

    return run


def items(*ids: str) -> list[Item]:
    return [Item(id, b'{"id":"%s"}' % id.encode()) for id in ids]


def response(
    id: str,
    status: str = "completed",
    output: list[Item] | None = None,
    *,
    at: float = 0,
    previous: str | None = None,
    conversation: str | None = None,
    note: str = "",
) -> Response:
    body = msgspec.json.encode({"id": id, "status": status, "note": note})
    return Response(id, at, status, body, tuple(output or ()), previous, conversation)
