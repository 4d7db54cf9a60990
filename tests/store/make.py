"""Responses to store, and tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import msgspec
import pytest

from mlx_server import limits
from mlx_server.store import ItemRecord, Record, Store
from mlx_server.store.usage import ROW_BYTES

P = ParamSpec("P")
R = TypeVar("R")

HANG = 60

RECOUNT = f"""SELECT total({ROW_BYTES} + length(body) + 2 * length(CAST(id AS BLOB))
        + ifnull(length(labels), 0)) FROM records
    UNION ALL SELECT total({ROW_BYTES} + length(body) + 2 * length(id)) FROM items
    UNION ALL SELECT total({ROW_BYTES} + length(body)) FROM events"""


def finish(call: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(asyncio.wait_for(call, HANG))


def runs(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        finish(test(*args, **kwargs))

    return run


def items(*ids: str) -> list[ItemRecord]:
    return [ItemRecord(id, b'{"id":"%s"}' % id.encode()) for id in ids]


def response(
    id: str,
    status: str = "completed",
    output: list[ItemRecord] | None = None,
    *,
    at: float = 0,
    previous: str | None = None,
    conversation: str | None = None,
    note: str = "",
) -> Record:
    body = msgspec.json.encode({"id": id, "status": status, "note": note})
    return Record(
        "response", id, at, body, status, previous, conversation, output=tuple(output or ())
    )


def limit(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(limits, name, value)


async def recounted(store: Store) -> int:
    rows = await store._submit(lambda: store._connected().execute(RECOUNT).fetchall())
    return int(sum(size for (size,) in rows))


def big(id: str, size: int = 10_000) -> ItemRecord:
    return ItemRecord(id, b"x" * size)
