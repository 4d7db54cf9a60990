"""Grammars compiled by llguidance: a few at a time, beside the thread that owns MLX."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from mlx_server import limits
from mlx_server.schemas.compiler import LIMITS, in_a_line
from mlx_server.worker.constrained_decoding.grammar_completion import (
    CompletionHints,
    completion_hints,
)
from mlx_server.worker.constrained_decoding.token_trie import Bitmask, Vocabulary

T = TypeVar("T")

Key = tuple[Vocabulary, str]


class GrammarRefused(ValueError):
    """The grammar can't be used. The message is for the client."""


class GrammarFailed(ValueError):
    """The grammar could not be followed any further."""


class CompiledGrammar(NamedTuple):
    matcher: LLMatcher
    completion: CompletionHints

    def copy(self) -> "CompiledGrammar":
        """For a row of one's own."""
        return CompiledGrammar(self.matcher.deep_copy(), self.completion)


class GrammarCompiler:
    """Used by one thread, and done so by others; `wake` is called in theirs when one is done."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._known: OrderedDict[Key, CompiledGrammar | GrammarRefused] = OrderedDict()
        self._running: dict[Key, tuple[Future[CompiledGrammar], float]] = {}
        """Also those that take too long: they can't be stopped."""

    def compiled(self, source: str, vocabulary: Vocabulary) -> CompiledGrammar | None:
        """A copy of one's own, or None while it is compiled. Raises Refused."""
        self._collect()
        key = vocabulary, source
        if key in self._known:
            self._known.move_to_end(key)
            match self._known[key]:
                case GrammarRefused() as refusal:
                    raise GrammarRefused(*refusal.args)
                case found:
                    return found.copy()
        if key not in self._running and len(self._running) < limits.COMPILE_THREADS.value:
            work = partial(_compile, source, vocabulary)
            self._running[key] = in_thread(work, self._wake), time.monotonic()
        left = self._seconds_left()
        if key in self._running and left[key] <= 0:
            raise GrammarRefused(
                f"it takes longer than {limits.COMPILE_SECONDS.value:.0f} seconds to prepare"
            )
        if key not in self._running and max(left.values()) <= 0:
            raise GrammarFailed("other grammars are being prepared, which take very long")
        return None

    @property
    def pause(self) -> float:
        """Seconds until one will have taken too long."""
        return min(
            (s for s in self._seconds_left().values() if s > 0),
            default=limits.COMPILE_SECONDS.value,
        )

    def forget(self, vocabulary: Vocabulary) -> None:
        for key in [key for key in self._known if key[0] is vocabulary]:
            del self._known[key]

    def _seconds_left(self) -> dict[Key, float]:
        now = time.monotonic()
        return {
            key: began + limits.COMPILE_SECONDS.value - now
            for key, (_, began) in self._running.items()
        }

    def _collect(self) -> None:
        for key, (future, _) in list(self._running.items()):
            if future.done():
                del self._running[key]
                self._known[key] = _finished(future)
        while len(self._known) > limits.COMPILED_GRAMMARS.value:
            self._known.popitem(last=False)


def in_thread(work: Callable[[], T], wake: Callable[[], None]) -> Future[T]:
    """Ends with the process, done or not."""
    future: Future[T] = Future()
    future.add_done_callback(lambda _: wake())
    before = threading.stack_size(limits.COMPILE_STACK_BYTES.value)
    try:
        threading.Thread(target=_run, args=(future, work), daemon=True).start()
    finally:
        threading.stack_size(before)
    return future


def _run(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # a panic of llguidance is no Exception
        future.set_exception(error)


def _finished(future: Future[CompiledGrammar]) -> CompiledGrammar | GrammarRefused:
    match future.exception():
        case None:
            return future.result()
        case GrammarRefused() as refusal:
            return refusal
        case error:
            return GrammarRefused(in_a_line(f"it can't be prepared: {error}"))


def _compile(source: str, vocabulary: Vocabulary) -> CompiledGrammar:
    if source.count("\n") > limits.WHOLE_GRAMMAR_RULES.value:
        raise GrammarRefused(f"it has more than {limits.WHOLE_GRAMMAR_RULES.value} rules")
    matcher = LLMatcher(vocabulary.trie, source, log_level=0, limits=LIMITS)
    try:
        # some faults show only here
        fill_bitmask(np.zeros_like(vocabulary.ends), matcher.deep_copy(), vocabulary)
    except GrammarFailed as error:
        raise GrammarRefused(*error.args) from None
    return CompiledGrammar(matcher, completion_hints(vocabulary.token_classes, matcher, source))


def fill_bitmask(bitmask: Bitmask, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
    """With the tokens that may come next. Raises GrammarFailed."""
    check(matcher)
    if matcher.is_stopped():
        bitmask[:] = vocabulary.ends
        return
    fill_next_token_bitmask(matcher, bitmask.view(np.int32)[None])
    check(matcher)
    np.bitwise_and(bitmask, vocabulary.known, out=bitmask)
    if not bitmask.any():
        raise GrammarFailed("no token of this model can go on with it")


def check(matcher: LLMatcher) -> None:
    """It never raises by itself."""
    if matcher.is_error():
        raise GrammarFailed(in_a_line(matcher.get_error()))
