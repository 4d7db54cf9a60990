"""The running responses: they are found by id here, and stored when they begin and end."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from mlx_server import limits
from mlx_server.api.responses.background import Background
from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.run import Run
from mlx_server.api.transport.byte_budget import ByteBudget
from mlx_server.api.transport.web_sockets import OpenSockets
from mlx_server.errors import NotFound, Overloaded, ServerError, ShuttingDown, StoreUnavailable
from mlx_server.store import Store

T = TypeVar("T")

log = logging.getLogger("mlx_server.api")

STORING_SECONDS = 5.0
"""How long the last event of a response waits for an unavailable store."""
RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 60.0
"""First and longest pause between attempts to store an end, which go on until one succeeds."""
STOP_SECONDS = 5.0

NOT_STORED = {"code": "server_error", "message": "The response could not be stored."}


class Runs:
    """The `RunStore` of stored responses, and the registry of all running ones."""

    def __init__(self, store: Store, places: int) -> None:
        self.store = store
        self.stopping = asyncio.Event()
        self.sockets = OpenSockets()
        self.logs = ByteBudget(limits.STREAM_LOGS_BYTES)
        self.socket_memory = ByteBudget(limits.SOCKETS_MEMORY_BYTES)
        self._turn = asyncio.Semaphore(places)
        self._running: dict[tuple[str, str], Run] = {}
        self._background: dict[str, Background] = {}
        self._connections: set[asyncio.Task[Any]] = set()
        self._later: set[asyncio.Task[Any]] = set()

    def find(self, id: str, owner: str) -> Run | None:
        return self._running.get((id, owner))

    def in_background(self, run: Run) -> Background | None:
        return self._background.get(run.record.id)

    async def begin(self, run: Run) -> None:
        record = run.record
        if len(self._later) >= limits.UNSTORED_ENDS:
            raise StoreUnavailable(
                "Ended responses can't be stored, and no new ones are started until they are. See "
                "the server's log, or send `store: false`."
            )
        await self.store.begin(record.response_record(run.response), record.owner, record.input)
        self._running[record.id, record.owner] = run

    async def end(self, run: Run, events: Sequence[bytes]) -> bool:
        storing = self._in_task(self._end(run, run.response, events))
        await asyncio.wait({storing}, timeout=STORING_SECONDS)
        return storing.done() and storing.result()

    def end_later(self, run: Run) -> None:
        self._in_task(self._end(run, run.response, ()))

    def forget(self, run: Run) -> None:
        self._running.pop((run.record.id, run.record.owner), None)
        self._in_task(self._forgotten(run))

    def claim(self, background: Background) -> None:
        """Reserves a place in the background until the response ends or `discard` is called.

        Raises Overloaded at a limit, ShuttingDown during shutdown.
        """
        record = background.run.record
        if self.stopping.is_set():
            raise ShuttingDown("The server is shutting down.")
        if len(self._background) >= (most := limits.BACKGROUND_RESPONSES):
            raise Overloaded(
                f"{most} responses run in the background already. Try again when one has ended."
            )
        owners = [each.run.record.owner for each in self._background.values()]
        if record.owner and owners.count(record.owner) >= limits.BACKGROUND_PER_CLIENT:
            raise Overloaded(
                f"Your key has {limits.BACKGROUND_PER_CLIENT} responses in the background "
                "already. Try again when one has ended."
            )
        if background.run.log and background.run.log.is_full:
            raise Overloaded(
                "The background responses are at their memory limit. Try again when one has ended."
            )
        self._background[record.id] = background

    def discard(self, background: Background) -> None:
        """Frees the place of a response that will not be started."""
        self._background.pop(background.run.record.id, None)
        background.discard()

    def go_on(self, run: Background) -> None:
        """Starts a response that has claimed its place."""
        id = run.run.record.id
        run.begin(self._turn).add_done_callback(lambda _: self._background.pop(id, None))

    async def drain(self) -> None:
        """Refuses new background responses, and waits for these and for WebSockets to end."""
        self.stopping.set()
        tasks = [run.task for run in self._background.values() if run.task]
        if busy := [*tasks, *self._connections]:
            await asyncio.wait(busy)

    def connect(self, connection: asyncio.Task[Any]) -> None:
        """Registers a WebSocket's task, which ends once `stopping` is set."""
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def stop(self) -> None:
        self.stopping.set()
        begun = [run for run in self._background.values() if run.task]
        await asyncio.gather(*(run.cancel() for run in begun))
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
        record = run.record
        try:
            await _retry(
                lambda: self.store.put(record.response_record(response), record.owner, events)
            )
            if run.log:
                run.log.drop()
            return True
        except ServerError as error:
            log.error("response %s can't be stored: %s", record.id, error)
            failed = {**response, "status": "failed", "error": NOT_STORED, "output": []}
            await _retry(lambda: self.store.put(record.response_record(failed), record.owner))
            return False
        finally:
            self._running.pop((record.id, record.owner), None)

    async def _forgotten(self, run: Run) -> None:
        with suppress(NotFound):
            await _retry(lambda: self.store.delete(run.record.id, run.record.owner))


async def _retry(write: Callable[[], Coroutine[Any, Any, object]]) -> None:
    pause = RETRY_SECONDS
    while True:
        try:
            await write()
            return
        except StoreUnavailable:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_SECONDS)
