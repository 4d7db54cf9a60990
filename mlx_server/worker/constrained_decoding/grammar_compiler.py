"""Compiles grammars with llguidance, a few at a time, outside the thread that owns MLX."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from mlx_server import limits
from mlx_server.schemas.compiler import LIMITS, in_a_line
from mlx_server.worker.constrained_decoding.completion_proposals import proposals_of
from mlx_server.worker.constrained_decoding.grammar_completion import (
    SEARCHED_AHEAD,
    CompletionHints,
    known_hints,
    searched_hints,
)
from mlx_server.worker.constrained_decoding.lazy_matcher import LazyMatcher, in_thread
from mlx_server.worker.constrained_decoding.token_trie import Bitmask, Vocabulary

SEARCHED_SOON = 8
"""A row whose first search is due within so many tokens waits until the search's matcher is
built."""

IsDone = Callable[[Future[Any]], bool]

Key = tuple[Vocabulary, str, bytes]
"""A vocabulary, a grammar, and the digest of the tokens that precede the answer's first one."""


class GrammarRefused(ValueError):
    """The grammar can't be used. The client sees the message."""


class CompilerBusy(Exception):
    """Slow grammars keep all threads busy. The client sees the message and may try again."""


class GrammarFailed(ValueError):
    """The grammar failed while the row was generating."""


class CompiledGrammar(NamedTuple):
    matcher: LLMatcher
    completion: CompletionHints
    search: LazyMatcher

    def copy(self) -> "CompiledGrammar":
        """Returns a copy for one row."""
        return self._replace(matcher=self.matcher.deep_copy())


class GrammarCompiler:
    """Used by one thread; compiles in others, which call `wake` when a grammar is ready."""

    def __init__(
        self, wake: Callable[[], None], clock: Callable[[], float], is_done: IsDone
    ) -> None:
        """clock, is_done: see `Inputs`."""
        self._wake, self._clock, self._is_done = wake, clock, is_done
        self._known: OrderedDict[Key, CompiledGrammar | GrammarRefused] = OrderedDict()
        self._running: dict[Key, tuple[Future[CompiledGrammar], float]] = {}
        """Each compilation and when it began; those past the time limit stay, as no thread can be
        stopped."""

    def compiled(
        self, source: str, vocabulary: Vocabulary, prefix: Sequence[int] = (), room: int = 0
    ) -> CompiledGrammar | None:
        """Returns a copy of the compiled grammar, None while it is being compiled.

        prefix: tokens that it has accepted already. room: the row's token limit; the search's
        matcher is awaited if the row is near it from the start.

        Raises GrammarRefused and CompilerBusy.
        """
        self._collect()
        key = vocabulary, source, sha256(array("q", prefix).tobytes()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            match self._known[key]:
                case GrammarRefused() as refusal:
                    raise GrammarRefused(*refusal.args)
                case found:
                    return found.copy() if self._is_searchable(found, room) else None
        if key not in self._running and len(self._running) < limits.COMPILE_THREADS.value:
            work = partial(_compile, source, vocabulary, prefix)
            self._running[key] = in_thread(work, self._wake), self._clock()
        left = self._seconds_left()
        if key in self._running and left[key] <= 0:
            # the time depends on the machine's load, so the grammar itself is not at fault
            raise CompilerBusy(
                f"the grammar is still being compiled after {limits.COMPILE_SECONDS.value:.0f} "
                "seconds. Try again later, or simplify the schema or grammar."
            )
        if key not in self._running and max(left.values()) <= 0:
            raise CompilerBusy("other slow grammars are still being compiled. Try again later.")
        return None

    def _is_searchable(self, grammar: CompiledGrammar, room: int) -> bool:
        first = room - grammar.completion.next_search(room)
        if first > SEARCHED_AHEAD:
            return True
        built = grammar.search.begin(self._wake)
        return first > SEARCHED_SOON or self._is_done(built)

    @property
    def pause(self) -> float:
        """Seconds until the next running compilation reaches the time limit."""
        return min(
            (s for s in self._seconds_left().values() if s > 0),
            default=limits.COMPILE_SECONDS.value,
        )

    def forget(self, vocabulary: Vocabulary) -> None:
        for key in [key for key in self._known if key[0] is vocabulary]:
            del self._known[key]

    def _seconds_left(self) -> dict[Key, float]:
        now = self._clock()
        return {
            key: began + limits.COMPILE_SECONDS.value - now
            for key, (_, began) in self._running.items()
        }

    def _collect(self) -> None:
        for key, (future, _) in list(self._running.items()):
            if self._is_done(future):
                del self._running[key]
                self._known[key] = _finished(future)
        while len(self._known) > limits.COMPILED_GRAMMARS.value:
            self._known.popitem(last=False)


def _finished(future: Future[CompiledGrammar]) -> CompiledGrammar | GrammarRefused:
    match future.exception():
        case None:
            return future.result()
        case GrammarRefused() as refusal:
            return refusal
        case error:
            return GrammarRefused(in_a_line(f"the grammar can't be compiled: {error}"))


def _compile(source: str, vocabulary: Vocabulary, prefix: Sequence[int] = ()) -> CompiledGrammar:
    if source.count("\n") > limits.WHOLE_GRAMMAR_RULES.value:
        raise GrammarRefused(f"the grammar has more than {limits.WHOLE_GRAMMAR_RULES.value} rules")
    trie, classes = vocabulary.trie, vocabulary.token_classes
    reading = in_thread(partial(proposals_of, source, classes), lambda: None)
    matcher = _matcher(source, trie)  # llguidance releases the GIL meanwhile
    if not matcher.is_error() and matcher.validate_tokens(list(prefix)) < len(prefix):
        raise GrammarRefused("the message to be continued is not the beginning of such an answer")
    matcher.consume_tokens(list(prefix))
    try:
        # Some errors appear only when the first mask is computed.
        fill_bitmask(np.zeros_like(vocabulary.ends), matcher.deep_copy(), vocabulary)
    except GrammarFailed as error:
        raise GrammarRefused(*error.args) from None
    search = LazyMatcher(partial(_matcher, source, trie, prefix))
    proposals = reading.result()
    hints = known_hints(classes, matcher.deep_copy(), proposals)
    if hints.tokens is None:
        hints = searched_hints(classes, search.copy(), proposals)
    return CompiledGrammar(matcher, hints, search)


def _matcher(source: str, trie: LLTokenizer, prefix: Sequence[int] = ()) -> LLMatcher:
    matcher = LLMatcher(trie, source, log_level=0, limits=LIMITS)
    matcher.consume_tokens(list(prefix))
    return matcher


def fill_bitmask(bitmask: Bitmask, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
    """Sets the bits of the tokens that may come next. Raises GrammarFailed."""
    check(matcher)
    if matcher.is_stopped():
        bitmask[:] = vocabulary.ends
        return
    fill_next_token_bitmask(matcher, bitmask.view(np.int32)[None])
    check(matcher)
    np.bitwise_and(bitmask, vocabulary.known, out=bitmask)
    if not bitmask.any():
        raise GrammarFailed("the grammar allows no token of this model next")


def check(matcher: LLMatcher) -> None:
    """Raises GrammarFailed if the matcher has an error; the matcher itself never raises."""
    if matcher.is_error():
        raise GrammarFailed(in_a_line(matcher.get_error()))
