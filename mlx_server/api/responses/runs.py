"""The running responses: they are found by id here, and stored when they begin and end.

A run in the background goes on whether or not a client waits for it, and keeps its events in
memory meanwhile. The store gets them each second, for clients of other servers.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from mlx_server import limits
from mlx_server.api.responses.answer import BROKEN, ResponseOutput
from mlx_server.api.responses.items import Wire
from mlx_server.errors import (
    BadRequest,
    NotFound,
    Overloaded,
    ServerError,
    ShuttingDown,
    StoreUnavailable,
)
from mlx_server.events import Event, Finished, Started
from mlx_server.http.resumable import EventLog
from mlx_server.http.web_sockets import OpenSockets
from mlx_server.store import RUNNING, ItemRecord, Record, RunNews, Store
from mlx_server.system.shared_budget import SharedBudget


def decoded(event: bytes) -> Wire:
    return msgspec.json.decode(event, type=Wire)


log = logging.getLogger("mlx_server.api")

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})

Events = AsyncGenerator[Event]


BUSY_SECONDS = 1.0
"""Pause before a response in the background that found the queue full tries again."""


class Run:
    """One response from its request to its end. The owner must call `aclose` in any case, or have
    it `go_on` in the background, which does."""

    def __init__(
        self,
        record: Record,
        owner: str,
        output: ResponseOutput,
        make_events: Callable[[], Events],
        runs: "Runs | None" = None,
        input: Sequence[ItemRecord] = (),
    ) -> None:
        """`record` is a new response's. `make_events` makes a source for each attempt to start.
        `runs` store it, with its input items; None if it is not to be stored."""
        self.id, self.owner = record.id, owner
        self.output = output
        self.input = input
        self.log: EventLog | None = None
        """Set for a background response that is streamed."""
        self.task: asyncio.Task[None] | None = None
        """Generates a background response until it has ended."""
        self.ended = False
        self.failure: ServerError | None = None
        self._record = record
        self._make_events = make_events
        self._events = make_events()
        self._runs = runs
        self._is_stored = False
        self._started: Started | None = None

    @property
    def response(self) -> Wire:
        return self.output.response

    @property
    def goes_on(self) -> bool:
        return not self.ended and self.response["status"] in RUNNING

    def news(self) -> RunNews:
        """What the store does not have yet."""
        first, events = (self.log.shared, self.log.events) if self.log else (0, [])
        return RunNews(self.id, self.owner, self.response["status"], first, events[first:])

    def record(self, response: Wire) -> Record:
        """The record of the response as it is now, or will have ended."""
        output = [ItemRecord(item["id"], msgspec.json.encode(item)) for item in response["output"]]
        fields = {name: value for name, value in response.items() if name != "output"}
        body = msgspec.json.encode(fields)
        return replace(self._record, status=response["status"], body=body, output=output)

    async def begin(self) -> Started:
        """Stores the response, then starts it. Raises ServerError and removes it if that fails."""
        await self.store()
        try:
            return await self.start()
        except ServerError:
            self.ended = True
            if self._runs:
                self._runs.forget(self)
            raise

    async def store(self) -> None:
        if self._runs:
            self._is_stored = True  # also if this call is cancelled: the store carries it out
            try:
                await self._runs.begin(self)
            except ServerError:
                self._is_stored = False
                raise
        self.input = ()  # frees memory: it is in the store now

    async def start(self) -> Started:
        started = await anext(self._events)
        assert isinstance(started, Started)
        self._started = started
        return started

    async def chunks(self) -> AsyncGenerator[Wire]:
        """Yields the stream's events. The last one comes after the response is stored."""
        assert self._started
        try:
            for chunk in self.output.chunks(self._started):
                yield chunk
            async for event in self._events:
                for chunk in self.output.chunks(event):
                    yield await self._recorded(chunk)
        except Exception as error:
            async for chunk in self.fail(error):
                yield chunk

    async def prepared(self) -> AsyncGenerator[Wire]:
        """Yields the events of a response without output, which later ones can continue."""
        for event in (Started(self.response["model"], 0), Finished(0, "tool_calls")):
            for chunk in self.output.chunks(event):
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
        if self._runs and self._is_stored and not self.ended:
            self.ended = True
            for _ in self.output.cancel():
                pass
            self._runs.end_later(self)
        await self._events.aclose()

    def queue(self, log: EventLog | None) -> None:
        """Makes it one that waits for its turn in the background. `log` is for streaming."""
        self.log = log
        for chunk in self.output.queue():
            self._note(chunk)

    async def go_on(self, turn: asyncio.Semaphore) -> None:
        """Runs it in the background. `turn` limits how many responses do so at once."""
        try:
            async with turn:
                await self._start_when_free()
                await self._note_all(self.chunks())
        except asyncio.CancelledError:
            await self._note_all(self.cancel())
        except Exception as error:
            await self._note_all(self.fail(error))
        finally:
            await self.aclose()
            if self.log:
                self.log.end()

    async def stop(self) -> None:
        """Cancels it in the background and waits until it has ended."""
        assert self.task
        if not self.ended:
            self.task.cancel()
        await asyncio.wait({self.task})

    async def _start_when_free(self) -> None:
        while True:
            try:
                await self.start()
                return
            except Overloaded:
                await asyncio.sleep(BUSY_SECONDS)
                self._events = self._make_events()

    async def _note_all(self, chunks: AsyncGenerator[Wire]) -> None:
        async for chunk in chunks:
            self._note(chunk)
            if self.log and self.log.is_full and not self.ended:
                raise ServerError(
                    "The events of this response, or of all background responses together, are "
                    "over their memory limit. Set a lower `max_output_tokens`, or leave out "
                    "`stream`.",
                    code="response_too_large",
                )

    def _note(self, chunk: Wire) -> None:
        if self.log:
            self.log.add(msgspec.json.encode(chunk))

    async def _last(self, chunks: Iterator[Wire]) -> AsyncGenerator[Wire]:
        if not self.ended:
            for chunk in chunks:
                yield await self._recorded(chunk)

    async def _recorded(self, chunk: Wire) -> Wire:
        """The chunk, once the response is stored if it is the last one."""
        if chunk["type"] not in TERMINAL:
            return chunk
        self.ended = True
        events = [*self.log.events, msgspec.json.encode(chunk)] if self.log else []
        if self._runs is None or await self._runs.end(self, events):
            return chunk
        return {**chunk, "response": {**chunk["response"], "store": False}}


T = TypeVar("T")

STORING_SECONDS = 5.0
"""How long the last event of a response waits for an unavailable store."""
RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 60.0
"""First and longest pause between attempts to store an end, which go on until one succeeds."""
STOP_SECONDS = 5.0

SHARE_SECONDS = 1.0
"""The interval at which the servers of one data directory look at each other's responses."""
CANCEL_SECONDS = 10.0
"""How long a client waits until another server has cancelled a response."""

NOT_STORED = {"code": "server_error", "message": "The response could not be stored."}


class Runs:
    """Stores responses, and is the registry of the running ones that are stored."""

    def __init__(self, store: Store, places: int) -> None:
        self.store = store
        self.stopping = asyncio.Event()
        """Set when WebSockets are to end."""
        self._is_closed = False
        self.sockets = OpenSockets()
        self.logs = SharedBudget(limits.STREAM_LOGS_BYTES)
        self.socket_memory = SharedBudget(limits.SOCKETS_MEMORY_BYTES)
        self._turn = asyncio.Semaphore(places)
        self._running: dict[tuple[str, str], Run] = {}
        self._background: dict[str, Run] = {}
        self._connections: set[asyncio.Task[Any]] = set()
        self._later: set[asyncio.Task[Any]] = set()
        self._sharing: asyncio.Task[None] | None = None

    def find(self, id: str, owner: str) -> Run | None:
        return self._running.get((id, owner))

    async def begin(self, run: Run) -> None:
        if len(self._later) >= limits.UNSTORED_ENDS:
            raise StoreUnavailable(
                "Ended responses can't be stored, and no new ones are started until they are. See "
                "the server's log, or send `store: false`."
            )
        events = [*run.log.events] if run.log else []
        await self.store.add(run.record(run.response), run.owner, run.input, events)
        if run.log:
            run.log.shared = len(events)
        self._running[run.id, run.owner] = run

    async def end(self, run: Run, events: Sequence[bytes]) -> bool:
        """Whether the response is stored now. If not, storing it is retried later."""
        storing = self._in_task(self._end(run, run.response, events))
        await asyncio.wait({storing}, timeout=STORING_SECONDS)
        return storing.done() and storing.result()

    def end_later(self, run: Run) -> None:
        self._in_task(self._end(run, run.response, ()))

    def forget(self, run: Run) -> None:
        self._running.pop((run.id, run.owner), None)
        self._in_task(self._forgotten(run))

    def claim(self, run: Run) -> None:
        """Reserves a place in the background until the response ends or `discard` is called.

        Raises Overloaded at a limit, ShuttingDown during shutdown.
        """
        if self._is_closed:
            raise ShuttingDown("The server is shutting down.")
        if len(self._background) >= (most := limits.BACKGROUND_RESPONSES):
            raise Overloaded(
                f"{most} responses run in the background already. Try again when one has ended."
            )
        owners = [each.owner for each in self._background.values()]
        if run.owner and owners.count(run.owner) >= limits.BACKGROUND_PER_CLIENT:
            raise Overloaded(
                f"Your key has {limits.BACKGROUND_PER_CLIENT} responses in the background "
                "already. Try again when one has ended."
            )
        if run.log and run.log.is_full:
            raise Overloaded(
                "The background responses are at their memory limit. Try again when one has ended."
            )
        self._background[run.id] = run

    def discard(self, run: Run) -> None:
        """Frees the place of a response that will not be started."""
        self._background.pop(run.id, None)
        if run.log:
            run.log.drop()

    def go_on(self, run: Run) -> None:
        """Starts a response that has claimed its place."""
        run.task = asyncio.create_task(run.go_on(self._turn))
        run.task.add_done_callback(lambda _: self._background.pop(run.id, None))
        if self._sharing is None or self._sharing.done():
            self._sharing = asyncio.create_task(self._share())

    async def _share(self) -> None:
        """Stores what is new of the responses in the background, for the clients of other servers,
        and cancels those that were cancelled or deleted there. It ends with the last one."""
        while self._background:
            await asyncio.sleep(SHARE_SECONDS)
            begun = [run for run in self._background.values() if run.task and run.goes_on]
            news = [run.news() for run in begun]
            with suppress(ServerError):  # it is tried again
                unwanted = await self.store.share(news)
                for run, shared in zip(begun, news, strict=True):
                    if (shared.id, shared.owner) in unwanted:
                        self._in_task(run.stop())
                    elif run.log:
                        run.log.shared += len(shared.events)

    async def response(self, id: str, owner: str) -> Wire:
        """The response as it is now. Raises NotFound."""
        if run := self.find(id, owner):
            return run.response
        stored = await self.store.get("response", id, owner)
        fields = msgspec.json.decode(stored.body, type=Wire)
        return {**fields, "output": [msgspec.Raw(item.body) for item in stored.output]}

    async def cancel(self, id: str, owner: str) -> Wire:
        """Cancels a background response, which another server may run. Returns it as it is then."""
        run = self.find(id, owner)
        if run and run.task:
            await run.stop()
            return run.response
        response = await self.response(id, owner)
        if not response["background"]:
            raise BadRequest("Only responses with `background: true` can be cancelled.", param="id")
        if response["status"] in RUNNING:
            await self.store.cancel(id, owner)
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_SECONDS):
                    while response["status"] in RUNNING:
                        await asyncio.sleep(SHARE_SECONDS / 4)
                        response = await self.response(id, owner)
        return response

    @property
    def is_busy(self) -> bool:
        return bool(self._background or self._connections)

    async def drain(self) -> None:
        """Refuses new background responses, and waits for these and for WebSockets to end."""
        self._is_closed = True
        self.stopping.set()
        tasks = [run.task for run in self._background.values() if run.task]
        if busy := [*tasks, *self._connections]:
            await asyncio.wait(busy)

    def connect(self, connection: asyncio.Task[Any]) -> None:
        """Registers a WebSocket's task, which ends once `stopping` is set."""
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def stop(self) -> None:
        self._is_closed = True
        self.stopping.set()
        if self._sharing:
            self._sharing.cancel()
        running = [each for each in self._background.values() if each.task]
        await asyncio.gather(*(each.stop() for each in running))
        if self._later:
            await asyncio.wait(self._later, timeout=STOP_SECONDS)
        for task in list(self._later):
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)

    def _in_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)
        return task

    async def _end(self, run: Run, response: Wire, events: Sequence[bytes]) -> bool:
        """Stores the response, or else a failed one. Returns whether it was stored as it is."""
        try:
            await _retry(lambda: self.store.put(run.record(response), run.owner, events))
            if run.log:
                run.log.drop()
            return True
        except ServerError as error:
            log.error("response %s can't be stored: %s", run.id, error)
            failed = {**response, "status": "failed", "error": NOT_STORED, "output": []}
            await _retry(lambda: self.store.put(run.record(failed), run.owner))
            return False
        finally:
            self._running.pop((run.id, run.owner), None)

    async def _forgotten(self, run: Run) -> None:
        with suppress(NotFound):
            await _retry(lambda: self.store.delete("response", run.id, run.owner))


async def _retry(write: Callable[[], Coroutine[Any, Any, object]]) -> None:
    pause = RETRY_SECONDS
    while True:
        try:
            await write()
            return
        except StoreUnavailable:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_SECONDS)
