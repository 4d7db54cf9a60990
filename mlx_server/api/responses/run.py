"""A response while it is generated."""

import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from mlx_server.api.handlers import PrependedEvents
from mlx_server.api.responses.event_log import EventLog
from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.output import BROKEN, ResponseOutput
from mlx_server.errors import ServerError
from mlx_server.events import Event, Finished, Started
from mlx_server.store import ItemRecord, ResponseRecord

log = logging.getLogger("mlx_server.api")

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})

Events = AsyncGenerator[Event]


@dataclass(frozen=True)
class RunRecord:
    """The parts of a response that are stored with it."""

    id: str
    owner: str
    created_at: float
    input: Sequence[ItemRecord]
    previous: str | None = None
    conversation: str | None = None

    def response_record(self, response: Wire) -> ResponseRecord:
        output = [ItemRecord(item["id"], msgspec.json.encode(item)) for item in response["output"]]
        rest = {name: value for name, value in response.items() if name != "output"}
        return ResponseRecord(
            self.id,
            self.created_at,
            response["status"],
            msgspec.json.encode(rest),
            output,
            self.previous,
            self.conversation,
        )


class RunStore(Protocol):
    """Stores runs."""

    async def begin(self, run: "Run") -> None: ...

    async def end(self, run: "Run", events: Sequence[bytes]) -> bool:
        """Whether the response is stored now; if not, storing it is retried later."""

    def end_later(self, run: "Run") -> None: ...

    def forget(self, run: "Run") -> None: ...


class NullRunStore:
    """The store of a response with `store: false`: it keeps nothing."""

    async def begin(self, run: "Run") -> None:
        pass

    async def end(self, run: "Run", events: Sequence[bytes]) -> bool:
        return True

    def end_later(self, run: "Run") -> None:
        pass

    def forget(self, run: "Run") -> None:
        pass


class Run:
    """One response from its request to its end. The owner must call `aclose` in any case."""

    def __init__(
        self, record: RunRecord, output: ResponseOutput, events: Events, run_store: RunStore
    ) -> None:
        self.record = record
        self.output = output
        self.log: EventLog | None = None
        """Set for a background response that is streamed."""
        self.ended = False
        self.failure: ServerError | None = None
        self._events = events
        self._run_store = run_store
        self._is_stored = False
        self._started: Started | None = None

    @property
    def response(self) -> Wire:
        return self.output.response

    async def begin(self) -> Started:
        """Stores the response, then starts it. Raises ServerError and removes it if that fails."""
        await self.store()
        try:
            return await self.start()
        except ServerError:
            self.ended = True
            self._run_store.forget(self)
            raise

    async def store(self) -> None:
        self._is_stored = True
        try:
            await self._run_store.begin(self)
        except ServerError:
            self._is_stored = False
            raise
        self.record = replace(self.record, input=())  # frees memory: it is in the store now

    async def start(self) -> Started:
        started = await anext(self._events)
        assert isinstance(started, Started)
        self._started = started
        return started

    def renew(self, events: Events) -> None:
        """Replaces the event source after a failed start."""
        self._events = events

    async def chunks(self) -> AsyncGenerator[Wire]:
        """Yields the stream's events. The last one comes after the response is stored."""
        assert self._started
        try:
            async for event in PrependedEvents(self._started, self._events):
                for chunk in self.output.feed(event):
                    yield await self._recorded(chunk)
        except Exception as error:
            async for chunk in self.fail(error):
                yield chunk

    async def prepared(self) -> AsyncGenerator[Wire]:
        """Yields the events of a response without output, which later ones can continue."""
        for event in (Started(self.response["model"], 0), Finished(0, "tool_calls", 0, 0)):
            for chunk in self.output.feed(event):
                yield await self._recorded(chunk)

    async def complete(self) -> Wire:
        response = self.response
        async for chunk in self.chunks():
            response = chunk.get("response", response)
        if self.failure:
            raise self.failure
        return response

    async def fail(self, error: Exception) -> AsyncGenerator[Wire]:
        if not isinstance(error, ServerError):
            log.error("a response ended with an error", exc_info=error)
            error = ServerError(BROKEN, code="internal_error")
        self.failure = error
        async for chunk in self._last(self.output.fail(error)):
            yield chunk

    async def cancel(self) -> AsyncGenerator[Wire]:
        async for chunk in self._last(self.output.cancel()):
            yield chunk

    async def aclose(self) -> None:
        """Frees the event source. A response that has not ended is cancelled."""
        if self._is_stored and not self.ended:
            self.ended = True
            for _ in self.output.cancel():
                pass
            self._run_store.end_later(self)
        await self._events.aclose()

    async def _last(self, chunks: Iterator[Wire]) -> AsyncGenerator[Wire]:
        if not self.ended:
            for chunk in chunks:
                yield await self._recorded(chunk)

    async def _recorded(self, chunk: Wire) -> Wire:
        if chunk["type"] not in TERMINAL:
            return chunk
        self.ended = True
        events = [*self.log.events, msgspec.json.encode(chunk)] if self.log else []
        if await self._run_store.end(self, events):
            return chunk
        return {**chunk, "response": {**chunk["response"], "store": False}}
