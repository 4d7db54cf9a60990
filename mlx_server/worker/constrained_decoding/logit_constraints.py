"""What the rows of a step may say next: their grammars and their budgets of reasoning."""

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from mlx_server.engine.messages import Generate
from mlx_server.schemas.compiler import in_a_line
from mlx_server.worker.constrained_decoding.grammar_compiler import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarRefused,
    check,
    fill_bitmask,
    in_thread,
)
from mlx_server.worker.constrained_decoding.grammar_completion import GrammarCompletion
from mlx_server.worker.constrained_decoding.thinking_budget import (
    ThinkingBudget,
    end_reasoning_early,
)
from mlx_server.worker.constrained_decoding.token_trie import Bitmask, Vocabulary

log = logging.getLogger("mlx_server.engine")

ALL_ALLOWED = np.uint32(0xFFFFFFFF)

MAX_LOGIT_SHIFT = 1e30
"""Biases and penalties push no allowed token further than this, where it is still told from one
that is not allowed, however cold it is drawn."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BYTE_MASKS = np.where(_BITS, np.float32(MAX_LOGIT_SHIFT), np.float32(-np.inf))
"""[256, 8]: the caps of eight tokens by the byte that says which of them are allowed."""


class LogitConstraint:
    """One row's. What goes wrong with it is kept, and ends that row."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammar: CompiledGrammar | None,
        budget: ThinkingBudget | None,
        stop_tokens: Collection[int],
        max_tokens: int,
        overflow_tokens: int = 0,
        banned: Collection[int] = (),
    ) -> None:
        """barred: what may not follow at once where reasoning was ended: an answer has to."""
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._matcher = grammar and grammar.matcher
        self._completion = self._new_completion()
        self._budget = budget
        self._stop_tokens = stop_tokens
        self._banned = banned
        self.left = max_tokens - overflow_tokens
        """Tokens that the row may still have, those aside that are spared."""
        self._overflow_tokens = overflow_tokens
        self.failure: str | None = None

    def step(self, token: int | None, bitmask: Bitmask) -> bool:
        """Takes the row's last token, None before it has one; whether not all may follow it.

        words: as wide as the logits.
        """
        try:
            if token is not None:
                self._advance(token)
            return not self._is_over(token) and self._restrict(bitmask)
        except Exception as error:
            log.warning("a row can't be guided any further", exc_info=True)
            self.failure = f"its grammar could not be followed: {error}"
            return False

    def _new_completion(self) -> GrammarCompletion | None:
        """What makes the room suffice that there is from now on."""
        grammar = self._grammar
        return (
            GrammarCompletion(self._vocabulary.token_classes, grammar.completion)
            if grammar
            else None
        )

    def _advance(self, token: int) -> None:
        self.left -= 1
        if not self.left and self._overflow_tokens:
            self.left, self._overflow_tokens = self._overflow_tokens, 0
            self._completion = self._new_completion()
        if self._budget:
            self._budget.advance(token)
        if self._matcher and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            check(self._matcher)

    def _is_over(self, token: int | None) -> bool:
        """Batches make one step more, whose token nobody gets."""
        return self.left <= 0 or token in self._stop_tokens

    def _restrict(self, bitmask: Bitmask) -> bool:
        forced = self._forced()
        if forced is not None:
            bitmask[:] = 0
            bitmask[forced // 32] = np.uint32(1 << forced % 32)
            return True
        answers = self._budget is not None and self._budget.was_ended
        if not (answers or self._matcher):
            return False
        bitmask[:] = ALL_ALLOWED
        if self._matcher:
            self._fill(bitmask, self._matcher)
        if answers:
            self._ban(bitmask)
        return True

    def _ban(self, bitmask: Bitmask) -> None:
        """The row goes on, unless nothing but its end may follow."""
        others = bitmask.copy()
        for token in self._banned:
            if token // 32 < len(others):
                others[token // 32] &= ~np.uint32(1 << token % 32)
        if others.any():
            bitmask[:] = others

    def _fill(self, bitmask: Bitmask, matcher: LLMatcher) -> None:
        """The vocabulary may be wider or narrower than the logits."""
        allowed = np.zeros_like(self._vocabulary.ends)
        fill_bitmask(allowed, matcher, self._vocabulary)
        if self._completion and not matcher.is_stopped():
            left = min(self.left, self._budget.answer) if self._budget else self.left
            self._completion.allow(matcher, allowed.view(np.int32), left)
        common = min(len(allowed), len(bitmask))
        bitmask[:common] = allowed[:common]
        bitmask[common:] = 0

    def _forced(self) -> int | None:
        if self._budget is None:
            return None
        if self._budget.used_up and self._fits(self._budget.end):
            self._budget.close()
        return self._budget.next

    def _fits(self, tokens: list[int]) -> bool:
        """Where the grammar does not let reasoning end, it is tried again at the next token."""
        return self._matcher is None or self._matcher.validate_tokens(tokens) == len(tokens)


class LogitConstraints:
    """Makes them; what takes long happens in other threads, which `wake` the caller's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._compiler = GrammarCompiler(wake)
        self._unread_vocabularies: dict[str, Callable[[], Vocabulary]] = {}
        """Vocabularies that nobody has begun to read."""
        self._vocabularies: dict[str, Future[Vocabulary]] = {}

    @property
    def pause(self) -> float:
        """Seconds until the next that waits must be told that it takes too long."""
        return self._compiler.pause

    def doing(self, model: str) -> str:
        """What keeps a row of it waiting for a guide."""
        read = (known := self._vocabularies.get(model)) is not None and known.done()
        return "compiling a grammar" if read else f"reading the vocabulary of {model}"

    def expect(self, model: str, folder: Path, stop_tokens: Sequence[int]) -> None:
        """Its vocabulary is read by `read_ahead`, or when its first row asks for a guide."""
        self._unread_vocabularies[model] = lambda: Vocabulary(folder, stop_tokens).build()

    def read_ahead(self) -> None:
        """Begins with a vocabulary, unless another is being read.

        For when no row is kept waiting: llguidance makes its tree in one go, for tenths of a
        second, in which no other Python code of the process runs.
        """
        if self._unread_vocabularies and all(known.done() for known in self._vocabularies.values()):
            self._vocabulary(next(iter(self._unread_vocabularies)))

    def forget(self, model: str) -> None:
        self._unread_vocabularies.pop(model, None)
        known = self._vocabularies.pop(model, None)
        if known and known.done() and not known.exception():
            self._compiler.forget(known.result())

    def constraint(self, request: Generate) -> LogitConstraint | None:
        """None: not yet. Raises Refused."""
        known = self._vocabulary(request.model)
        if not known.done():
            return None
        if error := known.exception():
            raise GrammarRefused(in_a_line(f"This model can't be guided: {error}"))
        vocabulary = known.result()
        grammar = None
        if request.grammar is not None:
            grammar = self._compiler.compiled(request.grammar, vocabulary)
            if grammar is None:
                return None
        budget = ThinkingBudget(request.thinking, vocabulary.text) if request.thinking else None
        if request.thinking and request.forced_tokens:
            request.forced_tokens = end_reasoning_early(
                request.forced_tokens, request.thinking, vocabulary.text
            )
        # a script that is over has nothing to say but its end
        barred = () if request.forced_tokens else request.stop_tokens
        stops, most, spare = request.stop_tokens, request.max_tokens, request.overflow_tokens
        return LogitConstraint(vocabulary, grammar, budget, stops, most, spare, barred)

    def _vocabulary(self, model: str) -> Future[Vocabulary]:
        if read := self._unread_vocabularies.pop(model, None):
            self._vocabularies[model] = in_thread(read, self._wake)
        return self._vocabularies[model]


class AdditiveMask:
    """How high a token may score for each of some rows: what a mask is where it is used.

    A float for each token, made here while the logits are computed: to take bits apart beside
    those would keep the rows waiting several times as long.
    """

    def __init__(self, constraints: Sequence[LogitConstraint]) -> None:
        self._constraints = constraints
        self._widen(0)

    def step(self, tokens: Sequence[int | None], width: int) -> NDArray[np.float32] | None:
        """[rows, width]: minus infinity for what may not follow; None if all may everywhere.

        tokens: the last of each row, None where it has none yet. Valid until the next step.
        """
        if self._bitmasks.shape[1] != -(-width // 32):
            self._widen(width)
        restricted = False
        for guide, token, row in zip(self._constraints, tokens, self._bitmasks, strict=True):
            if guide.step(token, row):
                restricted = True
            else:
                row[:] = ALL_ALLOWED
        if not restricted:
            return None
        np.take(BYTE_MASKS, self._bitmasks.view(np.uint8), axis=0, out=self._mask, mode="clip")
        return self._mask.reshape(len(self._constraints), -1)[:, :width]

    def _widen(self, width: int) -> None:
        rows, words = len(self._constraints), -(-width // 32)
        self._bitmasks = np.empty((rows, words), np.uint32)
        self._mask = np.empty((rows, 4 * words, 8), np.float32)
