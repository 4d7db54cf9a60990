"""The constraints on the rows' next tokens: grammars and thinking budgets, as a mask."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_server.engine.messages import Generate, Grammar
from mlx_server.schemas.compiler import in_a_line
from mlx_server.worker.constrained_decoding.grammar_compiler import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarRefused,
    IsDone,
    check,
    fill_bitmask,
)
from mlx_server.worker.constrained_decoding.grammar_completion import GrammarCompletion
from mlx_server.worker.constrained_decoding.mask_threads import (
    MaskHistory,
    MaskThreads,
    SlowMask,
    in_thread,
)
from mlx_server.worker.constrained_decoding.recorded_tokens import (
    LeftGrammar,
    RecordedTokens,
    recorded_tokens_of,
)
from mlx_server.worker.constrained_decoding.thinking_budget import (
    ThinkingBudget,
    end_reasoning_early,
)
from mlx_server.worker.constrained_decoding.token_trie import Bitmask, Vocabulary
from mlx_server.worker.constrained_decoding.yielding_matcher import RowGone, YieldingMatcher

log = logging.getLogger("mlx_server.engine")

ALL_ALLOWED = np.uint32(0xFFFFFFFF)

MAX_LOGIT_SHIFT = 1e30
"""Bound on what biases and penalties add to a logit: a banned token stays at -inf, below every
allowed token, at any temperature."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BYTE_MASKS = np.where(_BITS, np.float32(MAX_LOGIT_SHIFT), np.float32(-np.inf))
"""[256, 8]: the mask values of eight tokens, indexed by the byte of the bitmask that holds them."""


class LogitConstraint:
    """One row's grammar and thinking budget. An error is kept in `failure` and ends the row."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammar: CompiledGrammar | None,
        budget: ThinkingBudget | None,
        stop_tokens: Collection[int],
        max_tokens: int,
        overflow_tokens: int = 0,
        banned: Collection[int] = (),
        recording: RecordedTokens | None = None,
        rest: CompiledGrammar | None = None,
        client: str = "",
        threads: MaskThreads | None = None,
    ) -> None:
        """banned: tokens that may not come right after reasoning was cut off, such as stop tokens:
        an answer has to follow. recording: what a replay model's row plays. rest: the grammar from
        the forced end of reasoning on, if it is another one. threads: where masks are made that do
        not fit into a step; without them the row waits for each of its masks."""
        self.client, self.threads = client, threads
        self.history = MaskHistory()
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._matcher = _matcher_of(grammar)
        self._recording = recording
        self._completion = self._new_completion()
        self._rest = rest
        self._budget = budget
        self._stop_tokens = stop_tokens
        self._banned = banned
        self.left = max_tokens - overflow_tokens
        """Tokens that the row may still generate, without the overflow tokens."""
        self._overflow_tokens = overflow_tokens
        self._loop: int | None = None
        """The period of a loop, after which only the grammar's ending may follow. 0: the grammar
        demands what is repeated."""
        self.failure: str | None = None
        self.departure: LeftGrammar | None = None
        """The place where the row's recording left its grammar, which is a failure too."""

    def step(self, token: int | None, bitmask: Bitmask) -> bool:
        """Advances by the row's last token and fills `bitmask`, which is as wide as the logits.

        token: None before the first one. Returns False if every token may follow.
        """
        try:
            if token is not None:
                self._advance(token)
            return not self._is_over(token) and self._restrict(bitmask)
        except LeftGrammar as departure:
            self.departure = departure
            self.failure = "its recording leaves the grammar"
            return False
        except RowGone:
            return False
        except Exception as error:
            log.warning("a row's grammar could not be followed", exc_info=True)
            self.failure = f"its grammar could not be followed: {error}"
            return False

    @property
    def demands_more(self) -> bool:
        """Whether the grammar does not allow the row to end here."""
        matcher = self._matcher
        return matcher is not None and not (matcher.is_stopped() or matcher.is_accepting())

    def end_reasoning(self) -> bool:
        """Ends the reasoning as if its budget were used up. Returns False outside of reasoning."""
        if self._recording or not self._budget:
            return False
        return self._budget.use_up()

    def end_answer(self, period: int) -> None:
        """Ends the answer by the shortest way that the grammar allows, unless that is a long one.
        period: see `loop`."""
        if self._loop is None and not self._recording:
            self._loop = period

    @property
    def loop(self) -> int:
        """The number of tokens whose repetition has ended the answer; 0 if none has."""
        return self._loop or 0

    @property
    def lexer(self) -> object:
        """What rows of the same grammar share: only one of them can use it at a time."""
        return self if self._grammar is None else self._grammar.lexer

    def fail(self, failure: str) -> None:
        """Ends the row, whose mask another thread may be making."""
        self.failure = failure
        self.abandon()

    def abandon(self) -> None:
        """Ends what another thread may be computing for the row."""
        if self._matcher:
            self._matcher.is_abandoned = True
        if self._completion:
            self._completion.abandon()
        if self.threads:
            self.threads.drop(self)

    def _new_completion(self) -> GrammarCompletion | None:
        """Returns the grammar's completion, None without a grammar and for a recording that was
        cut off."""
        grammar = None if self._recording and self._recording.is_cut else self._grammar
        return grammar and GrammarCompletion(
            self._vocabulary.token_classes, grammar.completion, grammar.prefix
        )

    def _advance(self, token: int) -> None:
        self.left -= 1
        if self._recording:
            self._recording.played += 1
        if not self.left and self._overflow_tokens:
            self.left, self._overflow_tokens = self._overflow_tokens, 0
            if self._completion:
                self._completion.extend()
        if self._budget:
            self._budget.advance(token)
        if self._rest and self._budget and self._budget.was_ended:
            self._grammar, self._rest = self._rest, None
            self._matcher = _matcher_of(self._grammar)
            self._completion = self._new_completion()
        elif self._matcher and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            check(self._matcher.own)
            if self._completion:
                self._completion.advance(token)

    def _is_over(self, token: int | None) -> bool:
        """Whether the row has ended: a batch computes one more token, which is discarded."""
        return self.left <= 0 or token in self._stop_tokens

    def _restrict(self, bitmask: Bitmask) -> bool:
        forced = self._forced()
        if forced is not None:
            bitmask[:] = 0
            bitmask[forced // 32] = np.uint32(1 << forced % 32)
            return True
        begins_answer = self._budget is not None and self._budget.was_ended
        if not (begins_answer or self._matcher):
            return False
        bitmask[:] = ALL_ALLOWED
        if self._matcher:
            self._fill(bitmask, self._matcher)
        if begins_answer:
            self._ban(bitmask)
        return True

    def _ban(self, bitmask: Bitmask) -> None:
        """Removes the banned tokens from the bitmask, unless no other token is allowed."""
        others = bitmask.copy()
        for token in self._banned:
            if token // 32 < len(others):
                others[token // 32] &= ~np.uint32(1 << token % 32)
        if others.any():
            bitmask[:] = others

    def _fill(self, bitmask: Bitmask, matcher: YieldingMatcher) -> None:
        """Applies the grammar; the vocabulary may be wider or narrower than the logits."""
        allowed = np.zeros_like(self._vocabulary.ends)
        fill_bitmask(allowed, matcher.own, self._vocabulary)
        if self._recording:
            self._recording.check(allowed, self._vocabulary.text)
        if self._completion and self._loop and not matcher.is_stopped():
            if not self._completion.end(allowed.view(np.int32), matcher):
                self._loop = 0
        elif self._completion and not matcher.is_stopped():
            left = min(self.left, self._budget.answer) if self._budget else self.left
            self._completion.allow(allowed.view(np.int32), left, matcher)
            if self._recording:
                self._recording.close(allowed, self._completion.ending, self._stop_tokens)
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
        """Whether the grammar allows these tokens. Where it does not let reasoning end, the end is
        tried again at the next token."""
        return self._matcher is None or self._matcher.validate_tokens(tokens) == len(tokens)


def _matcher_of(grammar: CompiledGrammar | None) -> YieldingMatcher | None:
    return grammar and YieldingMatcher(grammar.matcher)


class LogitConstraints:
    """Makes the rows' constraints. Slow work runs in other threads, which call `wake`."""

    def __init__(
        self,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        is_done: IsDone = Future.done,
    ) -> None:
        """clock, is_done: see `Inputs`."""
        self._wake, self._is_done = wake, is_done
        self._compiler = GrammarCompiler(wake, clock, is_done)
        self.threads = MaskThreads(wake, clock, is_done)
        self._unread_vocabularies: dict[str, Callable[[], Vocabulary]] = {}
        """Readers of the vocabularies that are not being read yet, by model."""
        self._vocabularies: dict[str, Future[Vocabulary]] = {}

    @property
    def pause(self) -> float:
        """Seconds until the next running compilation reaches the time limit."""
        return self._compiler.pause

    def doing(self, model: str) -> str:
        """Returns the work that a row of the model is waiting for."""
        read = (known := self._vocabularies.get(model)) is not None and known.done()
        return "compiling a grammar" if read else f"reading the vocabulary of {model}"

    def expect(self, model: str, folder: Path, stop_tokens: Sequence[int]) -> None:
        """Registers a model; its vocabulary is read by `read_ahead` or for its first constraint."""
        self._unread_vocabularies[model] = lambda: Vocabulary(folder, stop_tokens).build()

    def read_ahead(self) -> None:
        """Begins to read a vocabulary, unless another one is being read.

        Call it while no row is running: llguidance builds its trie in tenths of a second, during
        which it holds the GIL.
        """
        if self._unread_vocabularies and all(known.done() for known in self._vocabularies.values()):
            self._vocabulary(next(iter(self._unread_vocabularies)))

    def forget(self, model: str) -> None:
        self._unread_vocabularies.pop(model, None)
        known = self._vocabularies.pop(model, None)
        if known and self._is_done(known) and not known.exception():
            self._compiler.forget(known.result())

    def constraint(self, request: Generate) -> LogitConstraint | None:
        """Returns None while the constraint is not ready. Raises GrammarRefused."""
        known = self._vocabulary(request.model)
        if not self._is_done(known):
            return None
        if error := known.exception():
            raise GrammarRefused(in_a_line(f"this model supports no constraints: {error}"))
        vocabulary = known.result()
        later = request.thinking.rest if request.thinking else None
        # both are asked for before either is ready, so that they are compiled at the same time
        client = request.client
        grammar = self._compiled(request.grammar, vocabulary, client, request.grammar_prefix)
        rest = self._compiled(later, vocabulary, client)
        if (request.grammar is not None and not grammar) or (later is not None and not rest):
            return None
        budget = ThinkingBudget(request.thinking, vocabulary.text) if request.thinking else None
        if request.thinking and request.forced_tokens:
            request.forced_tokens = end_reasoning_early(
                request.forced_tokens, request.thinking, vocabulary.text
            )
        # A replayed output may end right after its reasoning.
        banned = () if request.forced_tokens else request.stop_tokens
        stops, most, overflow = request.stop_tokens, request.max_tokens, request.overflow_tokens
        recording = recorded_tokens_of(request)
        return LogitConstraint(
            *(vocabulary, grammar, budget, stops, most, overflow, banned, recording, rest),
            client=request.client,
            threads=self.threads,
        )

    def _compiled(
        self,
        grammar: Grammar | None,
        vocabulary: Vocabulary,
        client: str,
        prefix: Sequence[int] = (),
    ) -> CompiledGrammar | None:
        if grammar is None:
            return None
        return self._compiler.compiled(grammar, vocabulary, prefix, client)

    def _vocabulary(self, model: str) -> Future[Vocabulary]:
        if read := self._unread_vocabularies.pop(model, None):
            self._vocabularies[model] = in_thread(read, self._wake)
        return self._vocabularies[model]


class AdditiveMask:
    """The mask of a batch's rows, one float for each token: -inf where the token is banned, and inf
    in rows that are not restricted, whose logits it leaves as they are.

    It covers all rows of the batch. A mask of some rows would be applied to a copy of their logits,
    which then has to be put back: on a CPU this took as long as the masks. The mask is expanded
    from bits to floats on the CPU while the logits are computed, which is several times faster for
    the rows than expanding it afterwards.
    """

    def __init__(
        self, constraints: Sequence[LogitConstraint | None], threads: MaskThreads | None = None
    ) -> None:
        """constraints: one for each row; None for a row that is not restricted. threads: where the
        masks are made that take too long for a step; without them `step` waits for all."""
        self._rows = len(constraints)
        self._constraints = [(row, found) for row, found in enumerate(constraints) if found]
        self._threads = threads
        self._widen(0)
        self.late: dict[int, SlowMask] = {}
        """The rows whose masks were not made in the latest step, with their masks."""

    def step(self, tokens: Sequence[int | None], width: int) -> NDArray[np.float32] | None:
        """Returns the mask, [rows, width], or None if no row is restricted.

        tokens: the last token of each row, None before its first. The result is valid until the
        next step.
        """
        if len(self._bitmask) != -(-width // 32):
            self._widen(width)
        self.late = {}
        if self._threads:
            self._make_in_time(self._threads, tokens)
        else:
            for row, constraint in self._constraints:
                self._put(row, self._bitmask, constraint.step(tokens[row], self._bitmask))
        return self._mask.reshape(self._rows, -1)[:, :width] if self._restricted else None

    def _make_in_time(self, threads: MaskThreads, tokens: Sequence[int | None]) -> None:
        threads.begin_step({constraint.client for _, constraint in self._constraints})
        for row, constraint in sorted(self._constraints, key=lambda one: one[1].history.seconds):
            if threads.fits(constraint):
                restricts = threads.make(constraint, tokens[row], self._bitmask)
                self._put(row, self._bitmask, restricts)
            else:
                self.late[row] = threads.make_later(constraint, tokens[row], len(self._bitmask))
        if self.late:
            threads.wait([*self.late.values()])
            for row, slow in [(row, slow) for row, slow in self.late.items() if slow.is_made]:
                self._put(row, slow.bitmask, bool(slow.restricts))
                del self.late[row]

    def _put(self, row: int, bitmask: Bitmask, restricts: bool) -> None:
        if restricts:
            bytes = bitmask.view(np.uint8)
            np.take(BYTE_MASKS, bytes, axis=0, out=self._mask[row], mode="clip")
            self._restricted.add(row)
        elif row in self._restricted:
            self._mask[row] = np.inf
            self._restricted.remove(row)

    def put(self, slow: SlowMask, width: int) -> NDArray[np.float32] | None:
        """Returns the mask of the only row, which was made meanwhile."""
        self._widen(width)
        self._put(0, slow.bitmask, bool(slow.restricts))
        return self._mask.reshape(1, -1)[:, :width] if self._restricted else None

    def _widen(self, width: int) -> None:
        words = -(-width // 32)
        self._bitmask = np.empty(words, np.uint32)
        """One bit for each token that a row may generate next; the rows use it one after the
        other."""
        self._mask = np.full((self._rows, 4 * words, 8), np.float32(np.inf))
        self._restricted = set[int]()
        """The rows that were restricted in the latest step."""
