"""A number of bytes, connections or processes that many share, and what each client has of some."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager


class SharedBudget:
    """First come, first served. A request over the whole budget is granted when nothing is used."""

    def __init__(self, most: int) -> None:
        self.used = 0
        self.most = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, size: int) -> bool:
        """Takes as much without waiting. Returns whether it was free."""
        if self._waiting or not self._fits(size):
            return False
        self.used += size
        return True

    def reserve(self, size: int) -> asyncio.Future[None]:
        """A future that is done when as much is taken. Cancelling it gives up the wait."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, taken))
        self._serve()
        return taken

    def give_back(self, size: int) -> None:
        self.used -= size
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            size, taken = self._waiting[0]
            if not taken.cancelled():
                if not self._fits(size):
                    return
                self.used += size
                taken.set_result(None)
            self._waiting.popleft()

    def _fits(self, size: int) -> bool:
        return self.used == 0 or self.used + size <= self.most


class ClientCounts:
    """How many of one kind each client has now."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    def of(self, client: str) -> int:
        return self._of[client]

    @property
    def total(self) -> int:
        return self._of.total()

    @contextmanager
    def one_more(self, client: str) -> Iterator[None]:
        self._of[client] += 1
        try:
            yield
        finally:
            self._of[client] -= 1
            self._of += Counter()  # drops clients without any
