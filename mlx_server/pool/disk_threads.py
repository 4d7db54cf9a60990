"""Threads that read the files of models and adapters, which a slow disk may keep waiting."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

STOP_SECONDS = 0.2
"""How long a server that stops waits for threads, such as downloads, to notice it."""

EACH = 3
"""Threads for each model: it is prepared, loaded, and asked for its adapters, once at a time."""


class DiskThreads:
    """A disk that does not answer holds up the models on it, and no other."""

    def __init__(self, models: Collection[str]) -> None:
        self._threads = ThreadPoolExecutor(EACH * max(1, len(models)), "disk")
        self._turns = {model: asyncio.Lock() for model in models}
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[[], T]) -> T:
        """Like asyncio.to_thread, but `stop` can wait for the thread after a cancellation."""
        return await asyncio.shield(self._begun(work))

    async def run_in_turn(self, model: str, work: Callable[[], T]) -> T:
        """Runs work for requests that name this model, one after the other. A client that leaves
        gives up its turn unless its work has begun."""
        turn = self._turns[model]
        await turn.acquire()
        running = self._begun(work)
        running.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(running)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    def _begun(self, work: Callable[[], T]) -> asyncio.Future[T]:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return running
