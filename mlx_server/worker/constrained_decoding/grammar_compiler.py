"""Compiles grammars with llguidance, a few at a time, outside the thread that owns MLX."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from mlx_server import limits
from mlx_server.engine.messages import Grammar
from mlx_server.fair_queue import address_of
from mlx_server.grammars.compiler import LIMITS, in_a_line
from mlx_server.worker.constrained_decoding.grammar_completion import (
    CompletionHints,
    completion_hints,
)
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher, in_thread
from mlx_server.worker.constrained_decoding.vocabulary import Bitmask, Vocabulary

IsDone = Callable[[Future[Any]], bool]

Key = tuple[Vocabulary, Grammar, bytes]
"""A vocabulary, a grammar, and the digest of the tokens that precede the answer's first one."""


SLOW_SECONDS = 0.5
"""A compilation that takes longer is slow, and no longer one of those that others wait for."""


class GrammarRefused(ValueError):
    """The grammar can't be used. The client sees the message."""


class CompilerBusy(Exception):
    """Slow grammars keep all threads busy. The client sees the message and may try again."""


class GrammarFailed(ValueError):
    """The grammar failed while the row was generating."""


class CompiledGrammar(NamedTuple):
    matcher: LLMatcher
    lexer: LLMatcher
    """The matcher with which all rows of the grammar share their lexer."""
    completion: CompletionHints
    prefix: Sequence[int] = ()
    """The tokens that the matcher has accepted already."""

    def copy(self) -> "CompiledGrammar":
        """Returns a copy for one row."""
        return self._replace(matcher=self.matcher.deep_copy())


class _Compilation(NamedTuple):
    grammar: Future[CompiledGrammar]
    began: float
    client: str


class GrammarCompiler:
    """Used by one thread; compiles in others, which call `wake` when a grammar is ready."""

    def __init__(
        self, wake: Callable[[], None], clock: Callable[[], float], is_done: IsDone
    ) -> None:
        """clock, is_done: see `Inputs`."""
        self._wake, self._clock, self._is_done = wake, clock, is_done
        self._known: OrderedDict[Key, CompiledGrammar | GrammarRefused] = OrderedDict()
        self._running: dict[Key, _Compilation] = {}
        """Those past the time limit stay, as no thread can be stopped."""

    def compiled(
        self, grammar: Grammar, vocabulary: Vocabulary, prefix: Sequence[int] = (), client: str = ""
    ) -> CompiledGrammar | None:
        """Returns a copy of the compiled grammar, None while it is being compiled.

        prefix: tokens that it has accepted already.

        Raises GrammarRefused and CompilerBusy.
        """
        self._collect()
        key = vocabulary, grammar, sha256(array("q", prefix).tobytes()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            match self._known[key]:
                case GrammarRefused() as refusal:
                    raise GrammarRefused(*refusal.args)
                case found:
                    return found.copy()
        now = self._clock()
        if key not in self._running and not self._awaited(client, now):
            work = partial(compiled, grammar, vocabulary, prefix)
            self._running[key] = _Compilation(in_thread(work, self._wake), now, client)
        if key in self._running and self._is_overdue(self._running[key], now):
            # the time depends on the machine's load, so the grammar itself is not at fault
            raise CompilerBusy(
                f"the grammar is still being compiled after {limits.COMPILE_SECONDS:.0f} "
                "seconds. Try again later, or simplify the schema or grammar."
            )
        if key not in self._running:
            awaited = self._awaited(client, now)
            if all(self._is_overdue(each, now) for each in awaited):
                raise CompilerBusy("other slow grammars are still being compiled. Try again later.")
        return None

    def _awaited(self, client: str, now: float) -> list[_Compilation]:
        """Returns the compilations of which one has to end, or turn out to be slow, before the
        client's next one begins. The slow ones of other clients are waited for only where they are
        very many."""
        running = [*self._running.values()]
        slow = [each for each in running if now - each.began > SLOW_SECONDS]
        quick = [each for each in running if each not in slow]
        slow_of_client = [each for each in slow if address_of(each.client) == address_of(client)]
        for some, most in (
            (slow_of_client, limits.COMPILE_THREADS),
            (quick, limits.COMPILE_THREADS),
            (running, limits.SLOW_COMPILE_THREADS),
        ):
            if len(some) >= most:
                return some
        return []

    def _is_overdue(self, compilation: _Compilation, now: float) -> bool:
        return now - compilation.began >= limits.COMPILE_SECONDS

    @property
    def pause(self) -> float:
        """Seconds until the next running compilation is slow, or reaches the time limit."""
        now, bounds = self._clock(), (SLOW_SECONDS, limits.COMPILE_SECONDS)
        began = [each.began for each in self._running.values()]
        left = [each + seconds - now for each in began for seconds in bounds]
        return min((s for s in left if s > 0), default=limits.COMPILE_SECONDS)

    def forget(self, vocabulary: Vocabulary) -> None:
        for key in [key for key in self._known if key[0] is vocabulary]:
            del self._known[key]

    def _collect(self) -> None:
        for key, compilation in list(self._running.items()):
            if self._is_done(compilation.grammar):
                del self._running[key]
                self._known[key] = _finished(compilation.grammar)
        while len(self._known) > limits.COMPILED_GRAMMARS:
            self._known.popitem(last=False)


def _finished(future: Future[CompiledGrammar]) -> CompiledGrammar | GrammarRefused:
    match future.exception():
        case None:
            return future.result()
        case GrammarRefused() as refusal:
            return refusal
        case error:
            return GrammarRefused(in_a_line(f"the grammar can't be compiled: {error}"))


def compiled(
    grammar: Grammar, vocabulary: Vocabulary, prefix: Sequence[int] = ()
) -> CompiledGrammar:
    source = grammar.source
    if source.count("\n") > limits.WHOLE_GRAMMAR_RULES:
        raise GrammarRefused(f"the grammar has more than {limits.WHOLE_GRAMMAR_RULES} rules")
    trie, classes = vocabulary.trie, vocabulary.token_classes
    # llguidance releases the GIL meanwhile
    matcher = LLMatcher(trie, source, log_level=0, limits=LIMITS)
    if not matcher.is_error() and matcher.validate_tokens(list(prefix)) < len(prefix):
        raise GrammarRefused("the message to be continued is not the beginning of such an answer")
    matcher.consume_tokens(list(prefix))
    try:
        # Some errors appear only when the first mask is computed.
        fill_bitmask(np.zeros_like(vocabulary.ends), matcher.deep_copy(), vocabulary)
    except GrammarFailed as error:
        raise GrammarRefused(*error.args) from None
    yielding = YieldingMatcher(matcher.deep_copy())
    hints = completion_hints(grammar, classes, yielding, prefix)
    return CompiledGrammar(matcher, matcher, hints, prefix)


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
