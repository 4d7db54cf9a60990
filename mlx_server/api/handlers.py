"""Generates the events of a request and folds them into a response, for every endpoint; the work is
cancelled when the client disconnects.

A client that closes only its sending side, which HTTP allows, counts as disconnected: the server
can't tell the two apart.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlx_server.api.fields import ignored_header
from mlx_server.api.metrics import Metrics
from mlx_server.api.overflow import messages_too_long, with_overflow_error
from mlx_server.api.security import with_client
from mlx_server.api.sse import OPENAI, EventStream, Frames
from mlx_server.events import Event, Started
from mlx_server.generation.generate import generate
from mlx_server.generation.plan import MakeOverflowError
from mlx_server.pool.pool import Pool
from mlx_server.requests import GenerateRequest

T = TypeVar("T")


async def while_connected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it and raises ClientDisconnect when the client leaves.

    The body must have been read, so that the next message can only be the disconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class Aggregator(Protocol):
    """Folds the events of an answer into one body."""

    def aggregate(self, events: AsyncIterator[Event]) -> Awaitable[Mapping[str, Any]]: ...


class EventFolder(Aggregator, Protocol):
    """Folds the events of an answer into one body, or into the chunks of a stream."""

    def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[Mapping[str, Any]]: ...


async def respond(
    http: Request,
    request: GenerateRequest,
    output: EventFolder,
    *,
    stream: bool,
    ignored: list[str],
    frames: Frames = OPENAI,
    overflow: MakeOverflowError = messages_too_long,
) -> Response:
    if not stream:
        return await respond_buffered(http, request, output, ignored=ignored, overflow=overflow)
    events, started = await _started(http, request, overflow)
    chunks = output.chunks(PrependedEvents(started, events))
    return EventStream(chunks, _headers(started, ignored), source=events, frames=frames)


async def respond_buffered(
    http: Request,
    request: GenerateRequest,
    output: Aggregator,
    *,
    ignored: list[str],
    overflow: MakeOverflowError = messages_too_long,
) -> Response:
    events, started = await _started(http, request, overflow)
    async with aclosing(events):
        body = await while_connected(http, _aggregated(output, PrependedEvents(started, events)))
    return json_response(body, _headers(started, ignored))


async def _started(
    http: Request, request: GenerateRequest, overflow: MakeOverflowError
) -> tuple[AsyncGenerator[Event], Started]:
    """Waits for the engine to accept the request: an error before that keeps its HTTP status."""
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    request = with_client(request, http)
    generated = with_overflow_error(generate(request, pool), overflow)
    events = metrics.answers.observed(generated, request.client, request.prompts)
    started = await while_connected(http, anext(events))
    assert isinstance(started, Started)
    return events, started


def _headers(started: Started, ignored: list[str]) -> dict[str, str]:
    return ignored_header([*ignored, *started.ignored])


def json_response(body: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body), media_type="application/json", headers=dict(headers or {})
    )


async def _aggregated(output: Aggregator, events: AsyncIterator[Event]) -> Mapping[str, Any]:
    return await output.aggregate(events)


class PrependedEvents(AsyncIterator[Event]):
    """An iterator with one more event in front; unlike a generator it need not be closed."""

    def __init__(self, first: Event, rest: AsyncIterator[Event]) -> None:
        self._first: Event | None = first
        self._rest = rest

    async def __anext__(self) -> Event:
        if self._first is None:
            return await anext(self._rest)
        first, self._first = self._first, None
        return first
