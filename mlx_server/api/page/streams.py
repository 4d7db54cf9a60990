"""The streams of the page's data: how many there are, and when they end."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlx_server import limits
from mlx_server.errors import Overloaded


class PageStreams:
    def __init__(self) -> None:
        self._of: Counter[str] = Counter()
        self._ended = asyncio.Event()

    @contextmanager
    def take(self, client: str) -> Iterator[None]:
        """Raises Overloaded if the client has too many."""
        if self._of[client] >= limits.PAGE_STREAMS:
            raise Overloaded(
                f"The page is open {self._of[client]} times already: close some of its tabs."
            )
        self._of[client] += 1
        try:
            yield
        finally:
            self._of[client] -= 1
            self._of += Counter()  # adding an empty Counter removes the clients with zero

    def end(self) -> None:
        """Ends all streams: the server stops, and should not wait for them."""
        self._ended.set()

    async def pause(self, seconds: float) -> bool:
        """Whether the stream goes on after so many seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        return not self._ended.is_set()
