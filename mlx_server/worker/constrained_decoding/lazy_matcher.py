"""A grammar's matcher for the search of endings, built when a row first comes near its limit.

Copies of a matcher share its lexer, whose states are limited: the search would use up those of the
rows, so that it has a matcher of its own. Most rows end long before they need it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llguidance import LLMatcher

from mlx_server.schemas.compiler import STACK_BYTES

T = TypeVar("T")


class LazyMatcher:
    """Shared by all rows of a grammar."""

    def __init__(self, build: Callable[[], LLMatcher]) -> None:
        """build: runs in another thread; llguidance releases the GIL meanwhile."""
        self._build = build
        self._lock = threading.Lock()
        self._built: Future[LLMatcher] | None = None

    def begin(self, wake: Callable[[], None] = lambda: None) -> Future[LLMatcher]:
        """Begins to build the matcher, unless that was begun before. wake: called in its thread."""
        with self._lock:
            if self._built is None:
                self._built = in_thread(self._build, wake)
            return self._built

    def copy(self) -> LLMatcher:
        """Returns a copy in the grammar's first state; waits until the matcher is built."""
        return self.begin().result().deep_copy()


def in_thread(work: Callable[[], T], wake: Callable[[], None]) -> Future[T]:
    """Runs `work` in a daemon thread, which does not keep the process from exiting."""
    future: Future[T] = Future()
    future.add_done_callback(lambda _: wake())
    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=_run, args=(future, work), daemon=True).start()
    finally:
        threading.stack_size(before)
    return future


def _run(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # a panic in llguidance is not an Exception
        future.set_exception(error)
