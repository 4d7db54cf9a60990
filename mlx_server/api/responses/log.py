"""The events of a response that runs in the background, while it runs."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from mlx_server.api.responses.items import Wire

MOST_BYTES = 32 * 2**20


class Log:
    """It grows, and is read from any place by any number of readers, each at its own pace."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        """JSON; the place of each is its sequence number."""
        self._bytes = 0
        self._complete = False
        self._news = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._bytes > MOST_BYTES

    def add(self, event: Wire) -> None:
        body = msgspec.json.encode(event)
        self.events.append(body)
        self._bytes += len(body)
        self._tell()

    def end(self) -> None:
        self._complete = True
        self._tell()

    async def read(self, start: int) -> AsyncGenerator[Wire]:
        """From this place to the end, which it waits for."""
        while True:
            while start < len(self.events):
                yield decoded(self.events[start])
                start += 1
            if self._complete:
                return
            await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def decoded(event: bytes) -> Wire:
    return msgspec.json.decode(event, type=Wire)
