"""The constraints on the rows' next tokens: grammars and thinking budgets, as a mask."""

import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from copy import copy
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from mlx_server.engine.messages import Generate, RowLeftGrammar, Thinking
from mlx_server.grammars.compiler import in_a_line
from mlx_server.models.files import Stamp, stamp_of_files
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
    RowGone,
    SlowMask,
    YieldingMatcher,
    in_thread,
)
from mlx_server.worker.constrained_decoding.vocabulary import Bitmask, Vocabulary


class ThinkingBudget:
    def __init__(self, thinking: Thinking, text: Sequence[bytes]) -> None:
        """text: the bytes of each token, see `Vocabulary.text`."""
        self.end = list(thinking.end)
        self._text = text
        self._left = sys.maxsize if thinking.budget is None else thinking.budget
        self.answer = sys.maxsize if thinking.answer is None else thinking.answer
        """The number of tokens that the server still takes after the reasoning."""
        self.inside = thinking.inside
        self._opens, self._closes = thinking.opens, thinking.closes
        self._tail_bytes = max(map(len, [*self._opens, *self._closes]), default=1) - 1
        self._tail = b""
        """The last bytes of the answer, which may begin a delimiter."""
        self._forced: list[int] = []
        """The tokens still to be forced, at the end of reasoning."""
        self._longer_rests: list[bytes] = []
        """The texts that would turn the opening delimiter just read into a longer one."""
        self._longer_begun = b""
        """The bytes after the opening delimiter just read."""
        self._held = 0
        """The number of tokens after that delimiter; they are reasoning if no longer delimiter
        results."""
        self.was_ended = False
        """Whether the last token completed the forced end of reasoning."""

    @property
    def used_up(self) -> bool:
        """Whether reasoning has to end and its end has not begun."""
        return self.inside and self._left <= 0 and not self._forced

    def use_up(self) -> bool:
        """Leaves no tokens for reasoning. Returns False if there were none or it is outside."""
        is_open = self.inside and self._left > 0
        self._left = min(self._left, 0)
        return is_open

    @property
    def next(self) -> int | None:
        """The next forced token while reasoning is being ended, else None."""
        return self._forced[0] if self._forced else None

    def copy(self) -> "ThinkingBudget":
        """Returns a copy that advances by itself."""
        budget = copy(self)
        budget._forced = [*self._forced]
        return budget

    def close(self) -> None:
        self._forced = list(self.end)

    def advance(self, token: int) -> None:
        reasoned = self._follow(self._text[token] if token < len(self._text) else b"")
        self.was_ended = self._forced == [token]
        if self._forced:
            del self._forced[0]
            self.inside = self.inside and bool(self._forced)
        elif reasoned:
            self._left -= self._reasoning_tokens()
        elif not self.inside:
            self.answer -= 1

    def _follow(self, text: bytes) -> bool:
        """Reads a token's text; returns whether the token counts as reasoning."""
        tail = self._tail + text
        passed = False
        self._longer_begun += text if self._longer_rests else b""
        while end := self._end_of_delimiter(tail):
            self.inside = not self.inside
            self._longer_rests = self._longer(tail[:end]) if self.inside else []
            tail = tail[end:]
            self._longer_begun, self._held = tail, 0
            passed = True
        self._tail = tail[-self._tail_bytes :] if self._tail_bytes else b""
        return self.inside and (bool(tail) or not passed)

    def _longer(self, text: bytes) -> list[bytes]:
        """Returns the missing rests of longer opening delimiters that begin with the one at the
        end of `text`."""
        ends = [mark for mark in self._opens if text.endswith(mark)]
        return [o[len(m) :] for m in ends for o in self._opens if o != m and o.startswith(m)]

    def _reasoning_tokens(self) -> int:
        """Returns how many reasoning tokens to count now: none while they may still belong to a
        longer delimiter, and all held ones once they do not."""
        self._held += 1
        whole = [rest for rest in self._longer_rests if self._longer_begun.startswith(rest)]
        if not whole and any(rest.startswith(self._longer_begun) for rest in self._longer_rests):
            return 0
        count = self._held
        if whole:
            count = int(self._longer_begun not in whole)
        self._longer_rests, self._longer_begun, self._held = [], b"", 0
        return count

    def _end_of_delimiter(self, tail: bytes) -> int:
        """Returns where the first complete delimiter ends, 0 if there is none. The result does not
        depend on how the text is cut into tokens."""
        delimiters = self._closes if self.inside else self._opens
        spans = ((tail.find(delimiter), len(delimiter)) for delimiter in delimiters)
        return min((at + length for at, length in spans if at >= 0), default=0)


def end_reasoning_early(
    forced_tokens: Sequence[int], thinking: Thinking, text: Sequence[bytes]
) -> list[int]:
    """Cuts the reasoning of a replayed output to the thinking budget."""
    limited = ThinkingBudget(thinking, text)
    unlimited = ThinkingBudget(msgspec.structs.replace(thinking, budget=sys.maxsize), text)
    kept: list[int] = []
    for at, token in enumerate(forced_tokens):
        if limited.used_up:
            after = _after_reasoning(forced_tokens, at, unlimited)
            rest = forced_tokens[after:] or forced_tokens[-1:]
            end = limited.end
            # what the replayed tokens repeat of the forced end is left out: both lead to the answer
            alike = (n for n in range(len(end), 0, -1) if [*end[-n:]] == [*rest[:n]])
            return [*kept, *end, *rest[next(alike, 0) :]]
        kept.append(token)
        limited.advance(token)
        unlimited.advance(token)
    return kept


def _after_reasoning(forced_tokens: Sequence[int], at: int, unlimited: ThinkingBudget) -> int:
    while at < len(forced_tokens) and unlimited.inside:
        unlimited.advance(forced_tokens[at])
        at += 1
    return at


SHOWN = 8
"""The number of allowed tokens that are reported."""
BEFORE = 60
"""The number of recorded tokens before the refused one that are reported."""


class RecordedTokens:
    def __init__(self, request: Generate) -> None:
        self._row, self._tokens = request.row, request.forced_tokens or []
        self.is_cut = request.recording_is_cut
        """Whether the recorded output was cut off at its end."""
        self.played = 0
        """The number of recorded tokens that the row has generated so far."""
        self._closes = False
        """Whether the token limit has made the row leave its recording for the grammar's end."""

    @property
    def _next(self) -> int:
        return self._tokens[min(self.played, len(self._tokens) - 1)]

    def departure(self, allowed: Bitmask, texts: Sequence[bytes]) -> RowLeftGrammar | None:
        """Returns a report if the next recorded token is not allowed. texts: the bytes of each
        token."""
        if self._closes or has_token(allowed, self._next):
            return None
        ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")).tolist()
        shortest = sorted(ids, key=lambda id: len(texts[id]) if id < len(texts) else 0)[:SHOWN]
        before = list(self._tokens[: self.played][-BEFORE:])
        others = len(ids) - len(shortest)
        return RowLeftGrammar(self._row, self.played, before, self._next, shortest, others)

    def close(
        self, allowed: Bitmask, ending: Sequence[int] | None, stop_tokens: Collection[int]
    ) -> None:
        """Reduces the allowed tokens to the ending's first one once the limit excludes the recorded
        token: all others are equally likely to a model without weights."""
        self._closes = self._closes or not has_token(allowed, self._next)
        if self._closes and ending is not None:
            following = ending[0] if ending else next(iter(stop_tokens))
            if has_token(allowed, following):
                allowed[:] = 0
                allowed[following // 32] = np.uint32(1 << following % 32)


def has_token(allowed: Bitmask, token: int) -> bool:
    return token // 32 < len(allowed) and bool(allowed[token // 32] >> np.uint32(token % 32) & 1)


log = logging.getLogger("mlx_server.engine")

ALL_ALLOWED = np.uint32(0xFFFFFFFF)

MAX_LOGIT_SHIFT = 1e30
"""Bound on what biases and penalties add to a logit: a banned token stays at -inf, below every
allowed token, at any temperature."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BYTE_MASKS = np.where(_BITS, np.float32(MAX_LOGIT_SHIFT), np.float32(-np.inf))
"""[256, 8]: the mask values of eight tokens, indexed by the byte of the bitmask that holds them."""


TOO_LARGE = (
    "following its patterns takes too many states: use fewer repetitions within repetitions, and "
    "shorter ones"
)


class LogitConstraint:
    """One row's grammar and thinking budget. An error is kept in `failure` and ends the row."""

    def __init__(
        self,
        request: Generate,
        vocabulary: Vocabulary,
        grammar: CompiledGrammar | None,
        rest: CompiledGrammar | None,
        threads: MaskThreads,
    ) -> None:
        """rest: the grammar from the forced end of reasoning on, if it is another one. threads:
        where masks are made that do not fit into a step."""
        self.client, self.threads = request.client, threads
        self.history = MaskHistory()
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._matcher = _matcher_of(grammar)
        self._lookahead: YieldingMatcher | None = None
        """A second matcher, which reads tokens that may not come and takes them back. The row's own
        does not: what exceeds a limit of a matcher ends it."""
        is_recorded = request.forced_tokens and request.recording
        self._recording = RecordedTokens(request) if is_recorded else None
        self._completion = self._new_completion()
        self._rest = rest
        thinking = request.thinking
        self._budget = ThinkingBudget(thinking, vocabulary.text) if thinking else None
        self._stop_tokens = request.stop_tokens
        self._banned = () if request.forced_tokens else request.stop_tokens
        """Tokens that may not come right after reasoning was cut off, since an answer has to
        follow. A replayed output may end there."""
        self.left = request.max_tokens - request.overflow_tokens
        """Tokens that the row may still generate, without the overflow tokens."""
        self._overflow_tokens = request.overflow_tokens
        self._read = 0
        """The number of the row's tokens that it has followed."""
        self._loop: int | None = None
        """The period of a loop, after which only the grammar's ending may follow. 0: the grammar
        demands what is repeated."""
        self.failure: str | None = None
        self.departure: RowLeftGrammar | None = None
        """The place where the row's recording left its grammar, which is a failure too."""

    def step(self, token: int | None, bitmask: Bitmask) -> bool:
        """Advances by the row's last token and fills `bitmask`, which is as wide as the logits.

        token: None before the first one. Returns False if every token may follow.
        """
        try:
            if token is not None:
                self._advance(token)
            return not self._is_over(token) and self._restrict(bitmask)
        except RowGone:
            return False
        except Exception as error:
            if "too many expressions" in str(error):
                self.failure = TOO_LARGE
            else:
                log.warning("a row's grammar could not be followed", exc_info=True)
                self.failure = f"its grammar could not be followed: {error}"
            return False

    def matcher_after(self, answer: Sequence[int]) -> LLMatcher | None:
        """Returns a matcher after the row's whole answer, of which the row may not have followed
        the last tokens yet; None where no draft can be made by it. The caller takes back what it
        lets the matcher read."""
        if self._matcher is None or self.history.is_slow or len(answer) < self._read:
            return None
        lookahead = self._lookahead_of(self._matcher)
        following = answer[self._read - self._matcher.read + lookahead.read :]
        return lookahead.own if lookahead.try_consume_tokens(following) == len(following) else None

    def _lookahead_of(self, matcher: YieldingMatcher) -> YieldingMatcher:
        # copied once: a copy takes as long as all that the matcher has read
        if self._lookahead is None or self._lookahead.own.is_error():
            self._lookahead = matcher.copy()
        return self._lookahead

    def look_ahead(self) -> "LogitConstraint":
        """Returns a copy that steps along tokens which may not come, until `look_back`."""
        constraint = self.copy()
        if self._matcher:
            lookahead = self._lookahead_of(self._matcher)
            if lookahead.read != self._matcher.read:
                lookahead = self._lookahead = self._matcher.copy()
            constraint._matcher = lookahead
        return constraint

    def copy(self) -> "LogitConstraint":
        """Returns a copy that steps in place of this one, with its matcher."""
        constraint = copy(self)
        constraint._completion = self._completion and self._completion.copy()
        constraint._budget = self._budget and self._budget.copy()
        constraint._recording = copy(self._recording)
        return constraint

    def look_back(self) -> None:
        """Takes back all that the copies have read."""
        if self._matcher and self._lookahead:
            self._lookahead.rollback(max(0, self._lookahead.read - self._matcher.read))

    def has_grammar_of(self, other: "LogitConstraint") -> bool:
        return self._grammar is other._grammar

    def become(self, other: "LogitConstraint", tokens: Sequence[int]) -> None:
        """Takes the state of a copy whose tokens, these ones, have come."""
        matcher, lookahead = self._matcher, self._lookahead
        has_same = self.has_grammar_of(other)
        vars(self).update(vars(other))
        if matcher and has_same:
            matcher.try_consume_tokens(tokens)
            self._matcher, self._lookahead = matcher, lookahead

    def follow(self, token: int | None) -> None:
        """Advances as `step` does, by a token that another engine has generated."""
        self.step(token, np.empty_like(self._vocabulary.ends))

    @property
    def demands_more(self) -> bool:
        """Whether the grammar does not allow the row to end here."""
        if self._matcher is None:
            return False
        return not (self._matcher.own.is_stopped() or self._matcher.own.is_accepting())

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
    def is_quick(self) -> bool:
        """Whether its masks take so little time that several of them fit into a step."""
        return self.threads.is_quick(self)

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
        self._read += 1
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
            self._matcher, self._lookahead = _matcher_of(self._grammar), None
            self._completion = self._new_completion()
        elif self._matcher and not self._matcher.own.is_stopped():
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
        texts = self._vocabulary.text
        if self._recording and (departure := self._recording.departure(allowed, texts)):
            self.departure, self.failure = departure, "its recording leaves the grammar"
        if self._completion and self._loop and not matcher.own.is_stopped():
            if not self._completion.end(allowed.view(np.int32), matcher):
                self._loop = 0
        elif self._completion and not matcher.own.is_stopped():
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
        self._sources: dict[str, _Source] = {}
        """What the vocabularies are read from, by model."""
        self._vocabularies: dict[str, Future[Vocabulary]] = {}
        """Those that are read or being read; models of one checkpoint share theirs."""

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
        self._vocabularies.pop(model, None)
        written = stamp_of_files([folder / "tokenizer.json"])
        self._sources[model] = _Source(folder, tuple(stop_tokens), written)

    def read_ahead(self) -> None:
        """Begins to read a vocabulary, unless another one is being read.

        Call it while no row is running: llguidance builds its trie in tenths of a second, during
        which it holds the GIL.
        """
        unread = next((model for model in self._sources if model not in self._vocabularies), None)
        if unread and all(map(self._is_done, self._vocabularies.values())):
            self._vocabulary(unread)

    def read(self, model: str) -> None:
        """Waits until the vocabulary is read. If it is unusable, rows with constraints fail."""
        wait((self._vocabulary(model),))

    def known_vocabulary(self, model: str) -> Vocabulary | None:
        """Returns a model's vocabulary if it has been read."""
        known = self._vocabularies.get(model)
        is_known = known is not None and self._is_done(known) and not known.exception()
        return known.result() if known and is_known else None

    def forget(self, model: str) -> None:
        self._sources.pop(model, None)
        known = self._vocabularies.pop(model, None)
        is_shared = known in self._vocabularies.values()
        if known and not is_shared and self._is_done(known) and not known.exception():
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
        compiled, whole, client = self._compiler.compiled, request.grammar, request.client
        prefix = request.grammar_prefix
        grammar = compiled(whole, vocabulary, prefix, client) if whole else None
        rest = compiled(later, vocabulary, client=client) if later else None
        if (whole and not grammar) or (later and not rest):
            return None
        if request.thinking and request.forced_tokens:
            request.forced_tokens = end_reasoning_early(
                request.forced_tokens, request.thinking, vocabulary.text
            )
        return LogitConstraint(request, vocabulary, grammar, rest, self.threads)

    def _vocabulary(self, model: str) -> Future[Vocabulary]:
        if model not in self._vocabularies:
            source = self._sources[model]
            shared = [v for name, v in self._vocabularies.items() if self._sources[name] == source]
            [self._vocabularies[model]] = shared[:1] or [
                in_thread(lambda: Vocabulary(source.folder, source.stop_tokens).build(), self._wake)
            ]
        return self._vocabularies[model]


class _Source(NamedTuple):
    """What a vocabulary is made of; a tokenizer.json that was replaced is another one."""

    folder: Path
    stop_tokens: tuple[int, ...]
    written: Stamp


Mask = NDArray[np.float32]
"""[rows, vocabulary]"""


class AdditiveMask:
    """The mask of a batch's rows, one float for each token: -inf where the token is banned, and inf
    in rows that are not restricted, whose logits it leaves as they are.

    It covers all rows of the batch. A mask of some rows would be applied to a copy of their logits,
    which then has to be put back: on a CPU this took as long as the masks. The mask is expanded
    from bits to floats on the CPU while the logits are computed, which is several times faster for
    the rows than expanding it afterwards.
    """

    def __init__(self, constraints: Sequence[LogitConstraint | None]) -> None:
        """constraints: one for each row; None for a row that is not restricted."""
        self._rows = len(constraints)
        self._constraints = [(row, found) for row, found in enumerate(constraints) if found]
        self._widen(0)
        self.late: dict[int, SlowMask] = {}
        """The rows whose masks were not made in the latest step, with their masks."""

    def step(self, tokens: Sequence[int | None], width: int) -> Mask | None:
        """Returns the mask, [rows, width], or None if no row is restricted.

        tokens: the last token of each row, None before its first. The result is valid until the
        next step.
        """
        if len(self._bitmask) != -(-width // 32):
            self._widen(width)
        self.late = {}
        if self._constraints:
            self._make_in_time(tokens)
        return self._mask.reshape(self._rows, -1)[:, :width] if self._restricted else None

    def _make_in_time(self, tokens: Sequence[int | None]) -> None:
        threads = self._constraints[0][1].threads
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

    @classmethod
    def of(cls, bitmasks: Sequence[Bitmask | None], width: int) -> Mask | None:
        """Returns the mask of bitmasks, one for each row; None for a row that is not restricted."""
        mask = cls([None] * len(bitmasks))
        mask._widen(width)
        for row, bitmask in enumerate(bitmasks):
            if bitmask is not None:
                mask._put(row, bitmask, True)
        return mask._mask.reshape(len(bitmasks), -1)[:, :width] if mask._restricted else None

    def _widen(self, width: int) -> None:
        words = -(-width // 32)
        self._bitmask = np.empty(words, np.uint32)
        """One bit for each token that a row may generate next; the rows use it one after the
        other."""
        self._mask = np.full((self._rows, 4 * words, 8), np.float32(np.inf))
        self._restricted = set[int]()
        """The rows that were restricted in the latest step."""
