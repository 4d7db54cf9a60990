"""The thread pool in which requests are parsed, rendered and tokenised.

A cancelled request occupies its thread until the work ends, at its next `check_wanted` or earlier.
Large requests may use only some of the threads, and so may the requests for one model, so that
neither can keep a small request for another model waiting. Of each kind, one thread is kept for
other clients than one that has all others.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from mlx_server import limits
from mlx_server.errors import Overloaded

T = TypeVar("T")

BYTES_PER_SECOND = 4 << 20
"""A request is queued as if it had arrived later by its size divided by this: small requests go
first, and no large one waits for ever."""

LARGE_BYTES = 256 << 10
"""Requests of more share limits.LARGE_REQUEST_THREADS."""

SMALL_BYTES = 64 << 10
"""Requests of at most this are parsed and walked through without a thread."""

size_of_request: ContextVar[int] = ContextVar("size_of_request", default=0)
"""Bytes of the current request: its body, and stored data that is read back for it."""

client_of_request: ContextVar[str] = ContextVar("client_of_request", default="")
"""See `GenerateRequest.client`."""


class Abandoned(Exception):
    """The request was cancelled: its result is no longer needed."""


class _Job:
    def __init__(self, work: Callable[[], Any], model: str | None) -> None:
        self.work, self.model = work, model
        self.owner = client_of_request.get()
        self.size = size_of_request.get()
        self.rank = time.monotonic() + self.size / BYTES_PER_SECOND
        self.context = copy_context()
        self.result: Future[Any] = Future()
        self.client = _Client()

    @property
    def is_large(self) -> bool:
        return self.size > LARGE_BYTES

    def run(self) -> None:
        self.context.run(_present.set, self.client)
        try:
            self.result.set_result(self.context.run(self.work))
        except BaseException as error:
            self.result.set_exception(error)
        finally:
            # The error's traceback references this frame, and the frame the error: without `del`
            # the cycle would keep the request in memory until the next garbage collection.
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
        self._threads = ThreadPoolExecutor(limits.REQUEST_THREADS, "request")

    async def run(self, work: Callable[[], T], model: str | None = None) -> T:
        """Run `work` in a thread; `model` is the model that it renders for, if any."""
        job = _Job(work, model)
        result: asyncio.Future[T] = asyncio.wrap_future(job.result)
        try:
            self._add(job)
            return await result
        except asyncio.CancelledError:
            with self._lock:
                job.client.waits = False
                if job in self._waiting:
                    self._waiting.remove(job)
            raise
        finally:
            del result  # it holds the error, whose traceback references this frame

    @property
    def busy(self) -> int:
        """Number of threads in use."""
        return len(self._running)

    def _add(self, job: _Job) -> None:
        with self._lock:
            held = sum(other.size for other in (*self._running, *self._waiting))
            if held and held + job.size > limits.UNREAD_REQUEST_BYTES:
                raise Overloaded("Too many large requests are being read. Try again in a moment.")
            self._waiting.append(job)
            self._begin()

    def _begin(self) -> None:
        """Start every job that a thread is free for. The caller holds the lock."""
        while ready := [job for job in self._waiting if self._has_place(job)]:
            job = min(ready, key=lambda job: job.rank)
            self._waiting.remove(job)
            if job.result.set_running_or_notify_cancel():
                self._running.append(job)
                self._submit(job)

    def _submit(self, job: _Job) -> None:
        """Runs the job, or fails it if no thread can be started. The caller holds the lock."""
        try:
            self._threads.submit(self._finish, job)
        except RuntimeError:  # the job is in the executor's queue all the same
            self._running.remove(job)
            job.result.set_exception(
                Overloaded("The system can't start another thread. Try again in a moment.")
            )

    def _has_place(self, job: _Job) -> bool:
        own = [other for other in self._running if job.owner and other.owner == job.owner]
        reserved = limits.OTHERS_REQUEST_THREADS
        return _fits(job, self._running) and (not own or _fits(job, own, reserved))

    def _finish(self, job: _Job) -> None:
        with self._lock:
            if job not in self._running:  # no thread could be started for it
                return
        try:
            job.run()
        finally:
            with self._lock:
                self._running.remove(job)
                self._begin()


def _fits(job: _Job, running: Sequence[_Job], reserved: int = 0) -> bool:
    """Whether the job may run next to these. reserved: the threads of each kind that stay free."""
    large = sum(other.is_large for other in running)
    of_model = sum(other.model == job.model for other in running)
    return (
        len(running) < limits.REQUEST_THREADS - reserved
        and (not job.is_large or large < limits.LARGE_REQUEST_THREADS - reserved)
        and (not job.model or of_model < limits.MODEL_REQUEST_THREADS - reserved)
    )


_shared = RequestThreads()


async def in_thread(work: Callable[..., T], *args: Any, model: str | None = None) -> T:
    """Like `asyncio.to_thread`, in the threads that all requests share."""
    return await _shared.run(lambda: work(*args), model)


async def in_thread_if_large(work: Callable[..., T], *args: Any) -> T:
    """Runs work that takes less than parsing for a small request here, and else in a thread."""
    if size_of_request.get() <= SMALL_BYTES:
        return work(*args)
    return await in_thread(work, *args)


def grow_request(size: int) -> None:
    """Count `size` bytes of stored data, read back for the request, as part of its size."""
    size_of_request.set(size_of_request.get() + size)
