"""The events of a response that runs in the background, while it runs."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from mlx_server import limits
from mlx_server.api.responses.items import Wire
from mlx_server.api.transport.byte_budget import ByteBudget


class EventLog:
    """It grows, and is read from any place by any number of readers, each at its own pace."""

    def __init__(self, budget: ByteBudget) -> None:
        self.events: list[bytes] = []
        """JSON; the place of each is its sequence number."""
        self.is_full = False
        self._budget = budget
        """Of the logs of all responses."""
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
        self.is_full = self.is_full or self._bytes > limits.STREAM_LOG_BYTES.value
        self._notify()

    def end(self) -> None:
        """Readers go on to the end of it."""
        self._complete = True
        self._budget.give_back(self._bytes)
        self._bytes = 0
        self._notify()

    def drop(self) -> None:
        """It is stored: readers find there what they have not read yet."""
        self.events = []
        self.end()

    async def read(self, start: int) -> AsyncGenerator[Wire]:
        """From this place to the end, which it waits for."""
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
