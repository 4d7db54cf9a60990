"""The threads in which requests are parsed, rendered and tokenised.

A place is taken until its thread has come to an end, also where the request was cancelled before:
what runs is what counts. Work for a client that has left ends at its next `check_wanted`. Large
requests share a few of the places, and so do those for one model, so that neither can keep a small
request for another model waiting.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from mlx_server import limits
from mlx_server.errors import Overloaded

T = TypeVar("T")

BYTES_PER_SECOND = 4 << 20
"""A request waits as if it had come later by its size divided by this: smaller ones go first, and
no large one waits for ever."""

size_of_request: ContextVar[int] = ContextVar("size_of_request", default=0)
"""Bytes of the body for which the present task works, and of what is read back for it."""


class Abandoned(Exception):
    """Nobody waits for the result any more."""


class _Job:
    def __init__(self, work: Callable[[], Any], model: str | None) -> None:
        self.work, self.model = work, model
        self.size = size_of_request.get()
        self.rank = time.monotonic() + self.size / BYTES_PER_SECOND
        self.context = copy_context()
        self.result: Future[Any] = Future()
        self.client = _Client()

    @property
    def is_large(self) -> bool:
        return self.size > limits.LARGE_REQUEST_BYTES.value

    def run(self) -> None:
        self.context.run(_present.set, self.client)
        try:
            self.result.set_result(self.context.run(self.work))
        except BaseException as error:
            self.result.set_exception(error)
        finally:
            # an error keeps the frames in which it was raised, and these the ones that called them:
            # without this they would keep the error, and the request, until garbage is collected
            del self.work, self.context, self.result


@dataclass
class _Client:
    waits: bool = True


_present: ContextVar[_Client | None] = ContextVar("_present", default=None)


def check_wanted() -> None:
    """Raises Abandoned in a thread whose request was cancelled."""
    client = _present.get()
    if client and not client.waits:
        raise Abandoned


class RequestThreads:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._threads = ThreadPoolExecutor(limits.REQUEST_THREADS.value, "request")

    async def run(self, work: Callable[[], T], model: str | None = None) -> T:
        """model: the one that it renders for, if it does."""
        job = _Job(work, model)
        result: asyncio.Future[T] = asyncio.wrap_future(job.result)
        try:
            self._add(job)
            return await result
        except asyncio.CancelledError:
            self._abandon(job)
            raise
        finally:
            del result  # which has the error, whose traceback has this frame

    @property
    def busy(self) -> int:
        """Places that are taken."""
        return len(self._running)

    def _add(self, job: _Job) -> None:
        with self._lock:
            held = sum(other.size for other in (*self._running, *self._waiting))
            if held and held + job.size > limits.UNREAD_REQUEST_BYTES.value:
                raise Overloaded("Too many large requests are being read. Try again in a moment.")
            self._waiting.append(job)
            self._begin()

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.client.waits = False
            if job in self._waiting:
                self._waiting.remove(job)

    def _begin(self) -> None:
        """Everything that may begin now; the lock is held."""
        while ready := [job for job in self._waiting if self._has_place(job)]:
            job = min(ready, key=lambda job: job.rank)
            self._waiting.remove(job)
            if job.result.set_running_or_notify_cancel():
                self._running.append(job)
                self._threads.submit(self._finish, job)

    def _has_place(self, job: _Job) -> bool:
        large = sum(other.is_large for other in self._running)
        models = Counter(other.model for other in self._running if other.model)
        return (
            len(self._running) < limits.REQUEST_THREADS.value
            and (not job.is_large or large < limits.LARGE_REQUEST_THREADS.value)
            and (not job.model or models[job.model] < limits.MODEL_REQUEST_THREADS.value)
        )

    def _finish(self, job: _Job) -> None:
        try:
            job.run()
        finally:
            with self._lock:
                self._running.remove(job)
                self._begin()


_shared = RequestThreads()


async def in_thread(work: Callable[..., T], *args: Any, model: str | None = None) -> T:
    """As `asyncio.to_thread`, in the threads that all requests share."""
    return await _shared.run(lambda: work(*args), model)


@contextmanager
def sized(size: int) -> Iterator[None]:
    """What is done inside is done for a request of so many bytes."""
    before = size_of_request.set(size)
    try:
        yield
    finally:
        size_of_request.reset(before)


def grow_request(size: int) -> None:
    """What is read back for a request counts as if it had been sent with it."""
    size_of_request.set(size_of_request.get() + size)
