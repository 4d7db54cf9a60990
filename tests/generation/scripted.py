"""An engine that says what the test wrote down, and what comes of it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import pytest

from mlx_server.engine.client import Item, RowStream
from mlx_server.engine.messages import Admitted, Generate, KvCost, Stop, Token
from mlx_server.errors import GenerationFailed, ServerError
from mlx_server.events import Event, Finished, Started, TextDelta
from mlx_server.generation.generate import generate
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest, SamplingParams
from tests.engine.stub import StubEngine

CONTEXT = 60
VOCABULARY = 500
KV_BYTES = 1000
"""Of a token."""


FIRST = 40
"""The engine's number of a request's first row."""


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


Batch = list[Item] | ServerError


T = TypeVar("T")


class Engine(StubEngine):
    """Says one batch after the other, and keeps what it is asked."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__(VOCABULARY, KvCost(KV_BYTES))
        self.rows: list[Generate] = []
        self.cancelled: list[int] = []
        self.done = False
        self._batches = list(batches)

    @asynccontextmanager
    async def generate(self, rows: Sequence[Generate]) -> AsyncIterator[RowStream]:
        for number, row in enumerate(rows, start=FIRST):
            row.row = number
        self.rows = list(rows)
        try:
            yield cast("RowStream", self)
        finally:
            self.done = True
            self.cancel([row.row for row in rows])

    def cancel(self, rows: Sequence[int]) -> None:
        self.cancelled += [row for row in rows if row not in self.cancelled]

    async def take(self) -> list[Item]:
        assert self._batches, "asked for more than there is"
        batch = self._batches.pop(0)
        if isinstance(batch, ServerError):
            raise batch
        return batch


PUBLISHERS = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
ASKED = GenerateRequest("m", ("Hello",))


def pooled(spec: ModelSpec, *batches: Batch) -> tuple[Pool, Engine]:
    pool, engine = Pool([spec]), Engine(batches)
    pool.make_engine = lambda **limits: engine
    return pool, engine


def run(pool: Pool, test: Coroutine[Any, Any, T]) -> T:
    """Nothing may be left of it: no answer, no lease, no reserved memory."""

    async def started() -> T:
        await pool.start()
        try:
            return await asyncio.wait_for(test, 20)
        finally:
            assert pool.row_slots.taken == 0
            assert pool.memory()["kv_reserved"] == 0
            assert [view.leases for view in pool.views()] == [0]
            await pool.stop()

    return asyncio.run(started())


def answered(
    spec: ModelSpec, request: GenerateRequest, *batches: Batch
) -> tuple[list[Event], Engine]:
    pool, engine = pooled(spec, *batches)

    async def gathered() -> list[Event]:
        return [event async for event in generate(request, pool)]

    events = run(pool, gathered())
    assert engine.done
    assert pool.row_slots.taken == 0
    assert not engine._batches, "not all was taken"
    return events, engine


def refused(spec: ModelSpec, request: GenerateRequest) -> ServerError:
    """The error of a request, which comes before any row is sent."""
    pool, engine = pooled(spec)

    async def first() -> None:
        async with aclosing(generate(request, pool)) as events:
            await anext(events)

    with pytest.raises(ServerError) as caught:
        run(pool, first())
    assert engine.rows == []
    assert pool.row_slots.taken == 0
    return caught.value


def rows_of(spec: ModelSpec, request: GenerateRequest) -> list[Generate]:
    """The rows that the engine is asked for."""
    pool, engine = pooled(spec, GenerationFailed("enough"))

    async def first() -> None:
        async with aclosing(generate(request, pool)) as events:
            await anext(events)

    with pytest.raises(GenerationFailed):
        run(pool, first())
    return engine.rows


def said(ids: list[int], row: int = 0, finish: Stop | None = None, **more: Any) -> list[Item]:
    """Tokens of one row; `finish` comes with the last."""
    last = len(ids) - 1
    return [
        Token(FIRST + row, id, finish if place == last else None, **more)
        for place, id in enumerate(ids)
    ]


def admitted(*rows: int) -> list[Item]:
    return [Admitted(FIRST + row) for row in rows or (0,)]


def text_of(events: list[Event], index: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta) and e.index == index)


def finished(events: list[Event]) -> list[Finished]:
    return [event for event in events if isinstance(event, Finished)]


END = [0]


def without_fingerprint(event: Event) -> Started:
    """It differs by version and by the files of the model."""
    assert isinstance(event, Started)
    assert event.fingerprint
    return replace(event, fingerprint=None)
