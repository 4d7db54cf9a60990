"""Threads that read the files of models and adapters, so that a slow disk blocks only them."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

STOP_SECONDS = 0.2
"""How long a server that stops waits for threads to end, for example those of downloads."""

THREADS_PER_MODEL = 3
"""The threads for each model. At most three tasks of one model run at once: its preparation, its
load and a lookup for a request, for example of its adapters."""


class DiskThreads:
    """Enough threads for all models, so that a disk that does not answer blocks only the models on
    it."""

    def __init__(self, models: Collection[str]) -> None:
        self._threads = ThreadPoolExecutor(THREADS_PER_MODEL * max(1, len(models)), "disk")
        self._turns = {model: asyncio.Lock() for model in models}
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[[], T]) -> T:
        """Like `asyncio.to_thread`, except that `stop` waits for a thread whose caller was
        cancelled."""
        return await asyncio.shield(self._begun(work))

    async def run_in_turn(self, model: str, work: Callable[[], T]) -> T:
        """Runs the lookups for requests of one model one at a time, so that they take one thread. A
        cancelled caller gives up its turn; work that has begun is completed."""
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
