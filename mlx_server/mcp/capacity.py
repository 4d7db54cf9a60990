"""A semaphore of which several units are taken at once, in order of arrival."""

import asyncio
from collections import deque

from mlx_server.errors import Overloaded


class CountingSemaphore:
    def __init__(self, most: int, wait_seconds: float, what: str) -> None:
        """what: the name of the resource, for the error message."""
        self._free = most
        self._wait_seconds = wait_seconds
        self._resource = what
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        """Takes `count` units together. Raises Overloaded if they are not free within
        `wait_seconds`."""
        if not count:
            return
        taken = asyncio.get_running_loop().create_future()
        self._waiting.append((count, taken))
        self._serve()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await taken
        except BaseException as error:
            if taken.done() and not taken.cancelled():
                self.free(count)
            self._serve()
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"Other requests use all {self._resource}. Try again in a moment."
                ) from None
            raise

    def free(self, count: int) -> None:
        self._free += count
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            count, taken = self._waiting[0]
            if not taken.done():
                if count > self._free:
                    return
                self._free -= count
                taken.set_result(None)
            self._waiting.popleft()
