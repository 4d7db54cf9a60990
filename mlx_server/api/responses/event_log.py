"""The events of a background response, kept in memory while it runs."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from mlx_server import limits
from mlx_server.api.responses.items import Wire
from mlx_server.api.transport.byte_budget import ByteBudget


class EventLog:
    """An append-only log for any number of readers, each with its own position."""

    def __init__(self, budget: ByteBudget) -> None:
        self.events: list[bytes] = []
        """JSON of each event, at the index of its sequence number."""
        self.is_full = False
        self._budget = budget
        """Shared by the logs of all responses."""
        self._bytes = 0
        self._complete = False
        self._news = asyncio.Event()

    def add(self, event: Wire) -> None:
        if self._complete:
            return
        body = msgspec.json.encode(event)
        self.events.append(body)
        if self._budget.take(len(body)):
            self._bytes += len(body)
        else:
            self.is_full = True
        self.is_full = self.is_full or self._bytes > limits.STREAM_LOG_BYTES
        self._notify()

    def end(self) -> None:
        """Marks the log as complete: readers stop after its last event."""
        self._complete = True
        self._budget.give_back(self._bytes)
        self._bytes = 0
        self._notify()

    def drop(self) -> None:
        """Frees the events once they are stored: readers get the rest from the store."""
        self.events = []
        self.end()

    async def read(self, start: int) -> AsyncGenerator[Wire]:
        """Yields the events from `start` on, and waits for more until the log is complete."""
        while True:
            while start < len(self.events):
                yield decoded(self.events[start])
                start += 1
            if self._complete:
                return
            await self._news.wait()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def decoded(event: bytes) -> Wire:
    return msgspec.json.decode(event, type=Wire)
