"""Streams of answers: events folded into chunks, one write for each, comments to keep
idle streams alive, always an end.

They are server-sent events, or what the `Frames` of an endpoint make of them.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_server.errors import ServerError
from mlx_server.events import Event, Started

log = logging.getLogger("mlx_server.api")

KEEP_ALIVE_SECONDS = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Chunks = AsyncGenerator[Mapping[str, Any]]


class Output(Protocol):
    """Folds the events of an answer into one body."""

    def add(self, event: Event) -> None: ...

    def body(self) -> Mapping[str, Any]: ...


class StreamedOutput(Output, Protocol):
    """Folds them into the chunks of a stream too."""

    def chunks(self, event: Event) -> Iterable[Mapping[str, Any]]:
        """Adds the event, and yields the chunks that it makes."""

    def end(self) -> Iterable[Mapping[str, Any]]:
        """The chunks after those of the last event."""
        return ()


Store = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Stores the body of a complete answer, before the client has its end."""


async def chunks_of(
    started: Started, events: AsyncIterator[Event], output: StreamedOutput, store: Store | None
) -> Chunks:
    for chunk in output.chunks(started):
        yield chunk
    async for event in events:
        for chunk in output.chunks(event):
            yield chunk
    for chunk in output.end():
        yield chunk
    if store:
        await store(output.body())


class AsyncClosable(Protocol):
    async def aclose(self) -> None: ...


def event(data: Mapping[str, Any]) -> bytes:
    """The bytes of one event, named by the `type` in its data, if there is one."""
    kind = data.get("type")
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames that a stream sends besides its chunks. The defaults are OpenAI's."""

    keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE
    end: bytes = DONE
    error: Callable[[ServerError], Mapping[str, Any]] = ServerError.body
    encode: Callable[[Mapping[str, Any]], bytes] = event
    media_type: str = "text/event-stream"


OPENAI = Frames()


async def encoded(chunks: Chunks, frames: Frames) -> AsyncGenerator[bytes]:
    """Yields a frame for each chunk, and one for the error with which they end, if any."""
    try:
        async for chunk in chunks:
            yield frames.encode(chunk)
    except ServerError as error:
        yield frames.encode(frames.error(error))
    except Exception:
        log.exception("a stream ended with an error")
        failure = ServerError(
            "The answer ended early: an internal error of the server.", code="internal_error"
        )
        yield frames.encode(frames.error(failure))


class EventStream(Response):
    """Streams `chunks`, which read from `source`, and closes both when the client leaves.

    Closing `chunks` alone is not enough: it may not have begun to read its source.
    """

    def __init__(
        self,
        chunks: Chunks,
        headers: Mapping[str, str],
        *,
        source: AsyncClosable,
        frames: Frames = OPENAI,
    ) -> None:
        no_buffering = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self.media_type = frames.media_type
        self.init_headers({**no_buffering, **headers})
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._source = source
        self._frames = frames
        self._last_write = 0.0
        self._writing = asyncio.Lock()
        self._comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._source), aclosing(self._chunks):
            with DisconnectGuard(receive):
                await send(start)
                self._last_write = asyncio.get_running_loop().time()
                self._keep_alive(send)
                try:
                    await self._stream(send)
                finally:
                    self._timer.cancel()
                    if self._comment:
                        self._comment.cancel()

    async def _stream(self, send: Send) -> None:
        async with aclosing(encoded(self._chunks, self._frames)) as frames:
            async for frame in frames:
                await self._write(send, frame)
        await self._write(send, self._frames.end, more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._writing:
            self._last_write = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _write_comment(self, send: Send) -> None:
        """Makes it and writes it next: it may be an event with the number after the last one."""
        if not self._writing.locked():
            await self._write(send, self._frames.keep_alive())

    def _keep_alive(self, send: Send) -> None:
        """Writes a comment if nothing was written for a while, and calls itself again."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._last_write >= KEEP_ALIVE_SECONDS:
            self._last_write = loop.time()
            if not self._writing.locked():  # else the client reads slowly
                self._comment = loop.create_task(self._write_comment(send))
        due = self._last_write + KEEP_ALIVE_SECONDS
        self._timer = loop.call_at(due, self._keep_alive, send)


class DisconnectGuard:
    """Cancels the task that runs its block when the client leaves, and ends the block then.

    The body must have been read, so that the next message can only be the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task
        self._task, self._cancelling = task, task.cancelling()
        self._watching = asyncio.ensure_future(self._watch())

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> bool:
        self._watching.cancel()
        # as in `asyncio.timeout`, a cancellation of the task by others goes on
        was_cancelled = self._is_gone and self._task.uncancel() <= self._cancelling
        return was_cancelled and kind is asyncio.CancelledError

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._task.cancel()
