"""What the rows of a step may say next: their grammars and their budgets of reasoning."""

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from mlx_server.engine.messages import Generate
from mlx_server.worker.constrained_decoding.grammar_compiler import (
    Compiled,
    Compiler,
    Refused,
    check,
    fill,
    in_a_line,
    in_thread,
)
from mlx_server.worker.constrained_decoding.grammar_completion import Ending
from mlx_server.worker.constrained_decoding.thinking_budget import Budget, cut_short
from mlx_server.worker.constrained_decoding.token_trie import Vocabulary, Words

log = logging.getLogger("mlx_server.engine")

ALL = np.uint32(0xFFFFFFFF)

FURTHEST = 1e30
"""Biases and penalties push no allowed token further than this, where it is still told from one
that is not allowed, however cold it is drawn."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
EIGHT = np.where(_BITS, np.float32(FURTHEST), np.float32(-np.inf))
"""[256, 8]: the caps of eight tokens by the byte that says which of them are allowed."""


class Guide:
    """One row's. What goes wrong with it is kept, and ends that row."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammar: Compiled | None,
        budget: Budget | None,
        stop_tokens: Collection[int],
        max_tokens: int,
        spare: int = 0,
        barred: Collection[int] = (),
    ) -> None:
        """barred: what may not follow at once where reasoning was ended: an answer has to."""
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._matcher = grammar and grammar.matcher
        self._ending = self._to_its_end()
        self._budget = budget
        self._stop_tokens = stop_tokens
        self._barred = barred
        self.left = max_tokens - spare
        """Tokens that the row may still have, those aside that are spared."""
        self._spare = spare
        self.failure: str | None = None

    def step(self, token: int | None, words: Words) -> bool:
        """Takes the row's last token, None before it has one; whether not all may follow it.

        words: as wide as the logits.
        """
        try:
            if token is not None:
                self._advance(token)
            return not self._over(token) and self._restrict(words)
        except Exception as error:
            log.warning("a row can't be guided any further", exc_info=True)
            self.failure = f"its grammar could not be followed: {error}"
            return False

    def _to_its_end(self) -> Ending | None:
        """What makes the room suffice that there is from now on."""
        grammar = self._grammar
        return Ending(self._vocabulary.pieces, grammar.prospect) if grammar else None

    def _advance(self, token: int) -> None:
        self.left -= 1
        if not self.left and self._spare:
            self.left, self._spare = self._spare, 0
            self._ending = self._to_its_end()
        if self._budget:
            self._budget.advance(token)
        if self._matcher and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            check(self._matcher)

    def _over(self, token: int | None) -> bool:
        """Batches make one step more, whose token nobody gets."""
        return self.left <= 0 or token in self._stop_tokens

    def _restrict(self, words: Words) -> bool:
        forced = self._forced()
        if forced is not None:
            words[:] = 0
            words[forced // 32] = np.uint32(1 << forced % 32)
            return True
        answers = self._budget is not None and self._budget.was_ended
        if not (answers or self._matcher):
            return False
        words[:] = ALL
        if self._matcher:
            self._fill(words, self._matcher)
        if answers:
            self._bar(words)
        return True

    def _bar(self, words: Words) -> None:
        """The row goes on, unless nothing but its end may follow."""
        others = words.copy()
        for token in self._barred:
            if token // 32 < len(others):
                others[token // 32] &= ~np.uint32(1 << token % 32)
        if others.any():
            words[:] = others

    def _fill(self, words: Words, matcher: LLMatcher) -> None:
        """The vocabulary may be wider or narrower than the logits."""
        allowed = np.zeros_like(self._vocabulary.ends)
        fill(allowed, matcher, self._vocabulary)
        if self._ending and not matcher.is_stopped():
            left = min(self.left, self._budget.answer) if self._budget else self.left
            self._ending.allow(matcher, allowed.view(np.int32), left)
        common = min(len(allowed), len(words))
        words[:common] = allowed[:common]
        words[common:] = 0

    def _forced(self) -> int | None:
        if self._budget is None:
            return None
        if self._budget.used_up and self._fits(self._budget.end):
            self._budget.close()
        return self._budget.next

    def _fits(self, tokens: list[int]) -> bool:
        """Where the grammar does not let reasoning end, it is tried again at the next token."""
        return self._matcher is None or self._matcher.validate_tokens(tokens) == len(tokens)


class Guides:
    """Makes them; what takes long happens in other threads, which `wake` the caller's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._compiler = Compiler(wake)
        self._unread: dict[str, Callable[[], Vocabulary]] = {}
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
        self._unread[model] = lambda: Vocabulary(folder, stop_tokens).plant()

    def read_ahead(self) -> None:
        """Begins with a vocabulary, unless another is being read.

        For when no row is kept waiting: llguidance makes its tree in one go, for tenths of a
        second, in which no other Python code of the process runs.
        """
        if self._unread and all(known.done() for known in self._vocabularies.values()):
            self._vocabulary(next(iter(self._unread)))

    def forget(self, model: str) -> None:
        self._unread.pop(model, None)
        known = self._vocabularies.pop(model, None)
        if known and known.done() and not known.exception():
            self._compiler.forget(known.result())

    def guide(self, asked: Generate) -> Guide | None:
        """None: not yet. Raises Refused."""
        known = self._vocabulary(asked.model)
        if not known.done():
            return None
        if error := known.exception():
            raise Refused(in_a_line(f"This model can't be guided: {error}"))
        vocabulary = known.result()
        grammar = None
        if asked.grammar is not None:
            grammar = self._compiler.compiled(asked.grammar, vocabulary)
            if grammar is None:
                return None
        budget = Budget(asked.thinking, vocabulary.text) if asked.thinking else None
        if asked.thinking and asked.script:
            asked.script = cut_short(asked.script, asked.thinking, vocabulary.text)
        # a script that is over has nothing to say but its end
        barred = () if asked.script else asked.stop_tokens
        stops, most, spare = asked.stop_tokens, asked.max_tokens, asked.spare
        return Guide(vocabulary, grammar, budget, stops, most, spare, barred)

    def _vocabulary(self, model: str) -> Future[Vocabulary]:
        if read := self._unread.pop(model, None):
            self._vocabularies[model] = in_thread(read, self._wake)
        return self._vocabularies[model]


class Caps:
    """How high a token may score for each of some rows: what a mask is where it is used.

    A float for each token, made here while the logits are computed: to take bits apart beside
    those would keep the rows waiting several times as long.
    """

    def __init__(self, guides: Sequence[Guide]) -> None:
        self._guides = guides
        self._widen(0)

    def step(self, tokens: Sequence[int | None], width: int) -> NDArray[np.float32] | None:
        """[rows, width]: minus infinity for what may not follow; None if all may everywhere.

        tokens: the last of each row, None where it has none yet. Valid until the next step.
        """
        if self._words.shape[1] != -(-width // 32):
            self._widen(width)
        restricted = False
        for guide, token, row in zip(self._guides, tokens, self._words, strict=True):
            if guide.step(token, row):
                restricted = True
            else:
                row[:] = ALL
        if not restricted:
            return None
        np.take(EIGHT, self._words.view(np.uint8), axis=0, out=self._caps, mode="clip")
        return self._caps.reshape(len(self._guides), -1)[:, :width]

    def _widen(self, width: int) -> None:
        rows, words = len(self._guides), -(-width // 32)
        self._words = np.empty((rows, words), np.uint32)
        self._caps = np.empty((rows, 4 * words, 8), np.float32)
