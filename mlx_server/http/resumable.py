"""Streams that go on when their client is lost: it asks for the rest by the number of an event.

A client opts in by a header. The answer is then written to a log, which any number of connections
read; without one for a minute it is cancelled, and a minute after its end it is forgotten.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from mlx_server import limits
from mlx_server.errors import BadRequest, NotFound, Overloaded, ServerError
from mlx_server.http.sse import AsyncClosable, Chunks, EventStream, Frames, encoded
from mlx_server.system.shared_budget import SharedBudget

RESUMABLE_HEADER = "x-mlx-server-resumable"
STREAM_HEADER = "x-mlx-server-stream"
"""Header of the answer, with the id of the stream."""

NUMBER = re.compile("[0-9]{1,15}")


class EventLog:
    """An append-only log for any number of readers, each with its own position."""

    def __init__(self, budget: SharedBudget) -> None:
        self.events: list[bytes] = []
        """Each event, at the index of its sequence number."""
        self.is_full = False
        self.shared = 0
        """How many events the store has, for the clients of other servers."""
        self._budget = budget
        """Shared by several logs."""
        self._bytes = 0
        self._complete = False
        self._news = asyncio.Event()

    def add(self, event: bytes) -> None:
        if self._complete:
            return
        self.events.append(event)
        if self._budget.take(len(event)):
            self._bytes += len(event)
        else:
            self.is_full = True
        self.is_full = self.is_full or self._bytes > limits.STREAM_LOG_BYTES
        self._notify()

    def complete(self) -> None:
        """Lets readers stop after the last event."""
        self._complete = True
        self._notify()

    def end(self) -> None:
        """Marks the log as complete, and no longer counts its bytes."""
        self._budget.give_back(self._bytes)
        self._bytes = 0
        self.complete()

    def drop(self) -> None:
        """Frees the events once they are stored, or not wanted any more."""
        self.events = []
        self.end()

    async def read(self, start: int) -> AsyncGenerator[bytes]:
        """Yields the events from `start` on, and waits for more until the log is complete."""
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self._complete:
                return
            await self._news.wait()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


@dataclass(frozen=True)
class StreamOwner:
    path: str
    """The path of the request."""
    owner: str
    source: str
    """See `authorise`."""


class ResumableStream:
    """One answer, written to a log by a task of its own."""

    def __init__(
        self, owner: StreamOwner, frames: Frames, log: EventLog, streams: "ResumableStreams"
    ) -> None:
        self.id = f"stream_{secrets.token_hex(16)}"
        self.owner, self.log = owner, log
        self.is_complete = False
        self.readers = 0
        self.task: asyncio.Task[None]
        self._frames = replace(frames, encode=_numbered, end=b"")
        self._streams = streams
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_reader()

    def response(self, after: int, headers: Mapping[str, str]) -> EventStream:
        """The frames after the first `after` ones."""
        chunks = self._read(after)
        headers = {**headers, STREAM_HEADER: self.id}
        return EventStream(chunks, headers, source=chunks, frames=self._frames)

    async def _read(self, after: int) -> Chunks:
        self.readers += 1
        if self._timer:
            self._timer.cancel()
        try:
            async for frame in self.log.read(after):
                after += 1
                yield {"id": after, "frame": frame}
        finally:
            self.readers -= 1
            if not self.readers:
                self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        seconds = limits.RESUMABLE_SECONDS
        self._expire_in(seconds, time.monotonic() + seconds)

    def _expire_in(self, seconds: float, end: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, end)

    def _expire(self, end: float) -> None:
        """end: by a clock that stands still while the machine sleeps, as uvloop's does not."""
        if (left := end - time.monotonic()) > 0:
            self._expire_in(left, end)
        else:
            self._streams.forget(self)

    async def write(self, chunks: Chunks, source: AsyncClosable, frames: Frames) -> None:
        try:
            async with aclosing(source), aclosing(chunks), aclosing(encoded(chunks, frames)) as all:
                async for frame in all:
                    self._add(frame)
                    if self.log.is_full:
                        self._add(frames.encode(frames.error(_too_large())))
                        break
                if frames.end:
                    self._add(frames.end)
        finally:
            self.is_complete = True
            self.log.complete()

    def _add(self, frame: bytes) -> None:
        self._streams.make_room(len(frame))
        self.log.add(frame)

    def end(self) -> None:
        if self._timer:
            self._timer.cancel()
        self.task.cancel()
        self.log.drop()


def _too_large() -> ServerError:
    return ServerError(
        f"The events of this answer exceed what is kept for a stream with `{RESUMABLE_HEADER}`. "
        "Set a lower limit on its tokens, or leave out the header.",
        code="response_too_large",
    )


def _numbered(chunk: Mapping[str, Any]) -> bytes:
    return b"id: %d\n" % chunk["id"] + bytes(chunk["frame"])


class ResumableStreams:
    """The streams of all clients, by id."""

    def __init__(self) -> None:
        self._streams: dict[str, ResumableStream] = {}
        """The oldest first."""
        self._starting: list[str] = []
        """The sources of those whose answers have not begun."""
        self._budget = SharedBudget(limits.RESUMABLE_BYTES)

    @contextmanager
    def place(self, source: str) -> Iterator[None]:
        """Keeps a place for a stream until its answer begins; those that have ended make room.
        Raises Overloaded."""
        for most, streams, starting in (
            (
                limits.RESUMABLE_PER_CLIENT,
                [each for each in self._all if each.owner.source == source],
                self._starting.count(source),
            ),
            (limits.RESUMABLE_STREAMS, self._all, len(self._starting)),
        ):
            unneeded = [each for each in streams if each.is_complete and not each.readers]
            for each in unneeded[: max(0, len(streams) + starting - most + 1)]:
                self.forget(each)
            if len(streams) + starting - len(unneeded) >= most:
                raise Overloaded(
                    f"{most} streams with `{RESUMABLE_HEADER}` run already. Try again when one has "
                    "ended, or leave out the header."
                )
        self._starting.append(source)
        try:
            yield
        finally:
            self._starting.remove(source)

    @property
    def _all(self) -> list[ResumableStream]:
        return [*self._streams.values()]

    def begin(
        self, owner: StreamOwner, chunks: Chunks, source: AsyncClosable, frames: Frames
    ) -> ResumableStream:
        stream = ResumableStream(owner, frames, EventLog(self._budget), self)
        self._streams[stream.id] = stream
        stream.task = asyncio.create_task(stream.write(chunks, source, frames))
        return stream

    def find(self, id: str, path: str, owner: str) -> ResumableStream:
        stream = self._streams.get(id)
        if stream is None or (stream.owner.path, stream.owner.owner) != (path, owner):
            raise NotFound(
                f"Stream with id '{id}' not found. A stream can be resumed for "
                f"{limits.RESUMABLE_SECONDS} seconds after its connection was lost, with the key "
                "of its request."
            )
        return stream

    def make_room(self, nbytes: int) -> None:
        """Forgets streams that have ended, for the bytes of one that runs."""
        for each in self._all:
            if self._budget.used + nbytes <= limits.RESUMABLE_BYTES:
                return
            if each.is_complete and not each.readers:
                self.forget(each)

    def forget(self, stream: ResumableStream) -> None:
        """Cancels the answer, if it goes on."""
        self._streams.pop(stream.id, None)
        stream.end()

    async def stop(self) -> None:
        tasks = [each.task for each in self._all]
        for each in self._all:
            self.forget(each)
        await asyncio.gather(*tasks, return_exceptions=True)


async def resumed(http: Request, id: str, after: str = "0") -> EventStream:
    """The rest of a stream. A browser that connects again sends the number in a header."""
    path = http.scope["path"].removesuffix(f"/{id}/stream")
    streams: ResumableStreams = http.app.state.resumable
    stream = streams.find(id, path, http.state.owner)
    number = http.headers.get("last-event-id", after)
    if not NUMBER.fullmatch(number):
        raise BadRequest("`after` should be the number of an event, 0 or more.", param="after")
    if int(number) > (sent := len(stream.log.events)):
        raise BadRequest(
            f"`after` is {int(number)}, but the stream has {sent} events so far.", param="after"
        )
    return stream.response(int(number), {})
