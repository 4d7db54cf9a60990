"""Completes a row's grammar before the row reaches its token limit.

From any state of a matcher an ending can be found: tokens that lead to where the grammar may stop
(see ending_search.py). While far more tokens are left than the ending needs, nothing is restricted.
Later a token is allowed only if the ending that it would require still fits. So text and numbers
continue while there is room, new members and items begin only where they can be finished, and in
the end only the ending itself is allowed.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from mlx_server.worker.constrained_decoding.completion_guide import CompletionGuide, guide_of
from mlx_server.worker.constrained_decoding.ending_search import CONSUMED, EndingSearch, Probe
from mlx_server.worker.constrained_decoding.token_classes import Ids, Mask, TokenClasses

FEW = 8
"""In a class of more tokens than this, a sample of three stands for all."""

RESERVE = 2
"""Tokens by which the others of a class may lengthen the ending more than the sample."""

MARGIN = 8
"""A row is restricted up to this many tokens before what its ending and a token may need."""

FIRST_WORK = 15_000
"""What the search from a grammar's beginning may spend, where the grammar is compiled."""

STEP_WORK = 750
"""What one row may spend between two of its tokens on each of its two tasks: to find an ending, and
to judge the tokens that may come next. It is about a millisecond."""

TOKEN_WORK = 120
"""What the search after one of the allowed tokens may spend."""

NEVER = 1 << 20
"""The cost of a token after which no ending was found."""


@dataclass(frozen=True)
class CompletionHints:
    """What was found out about a grammar's endings at compile time, shared by all of its rows."""

    guide: CompletionGuide = field(default_factory=CompletionGuide)
    tokens: list[int] | None = None
    """An ending from the grammar's start; None if none was found."""

    @property
    def reach(self) -> int:
        """A row with this many tokens more than its ending needs is not restricted."""
        return self.guide.growth + self.guide.reserve + MARGIN


def completion_hints(
    classes: TokenClasses, matcher: LLMatcher, grammar: str = ""
) -> CompletionHints:
    """Finds an ending from the grammar's beginning, in a thread where no row waits.

    matcher: in its initial state, where it is left. grammar: its source in Lark.
    """
    guide, probe = guide_of(grammar, classes), Probe(matcher)
    probe.allow(FIRST_WORK)
    return CompletionHints(guide, EndingSearch(classes, guide).find(probe, [], NEVER))


class Judgement(NamedTuple):
    """By how many tokens the tokens of a mask lengthen the ending; -1 is the ending's own next
    token."""

    ids: Ids
    growth: NDArray[np.int64]
    plain: int | None
    """The growth of all the others, which are the plain tokens, if they were not judged singly."""


class GrammarCompletion:
    """Restricts one row's tokens so that its grammar can be completed within the token limit."""

    def __init__(self, classes: TokenClasses, hints: CompletionHints, matcher: LLMatcher) -> None:
        """matcher: one for the search alone, in the state of the row's own."""
        self._classes = classes
        self._search = EndingSearch(classes, hints.guide)
        self._guide = hints.guide
        self._probe = Probe(matcher)
        self._reach = hints.reach
        self._tokens = hints.tokens
        """The latest ending that was found; None if there was none."""
        self._fits = hints.tokens is not None
        """Whether that ending is one of the present state."""
        self._next = NEVER * NEVER
        """The remaining tokens at which the next search is due."""
        self._judged: tuple[bytes, list[int], Judgement] | None = None
        """The latest judgement, with the mask and the ending that it was made for."""

    @property
    def ending(self) -> list[int] | None:
        """The ending that `allow` found last; None if there was none."""
        return self._tokens

    def advance(self, token: int) -> None:
        """Follows the row's latest token."""
        self._probe.take([token])
        following, *rest = self._tokens or [-1]
        self._fits = self._fits and following == token
        if self._fits:
            self._tokens = rest

    def extend(self) -> None:
        """Begins with a new token limit."""
        self._next = NEVER * NEVER

    def allow(self, mask: Mask, remaining: int) -> None:
        """Removes the tokens from the matcher's present mask that would leave no room for an
        ending. remaining: the tokens left to the row, including the next one and a stop token."""
        if remaining > self._next or self._probe.failed:
            return
        self._probe.allow(STEP_WORK)
        if not self._fits:
            found = self._search.find(self._probe, self._tokens or [], NEVER)
            self._fits = found is not None
            self._tokens = found if found is not None else self._tokens
        if not self._fits or self._tokens is None or len(self._tokens) >= remaining:
            self._next = remaining - 1 - remaining // 8
            return
        slack = remaining - 1 - len(self._tokens)
        if slack > self._reach:
            self._next = remaining - max(1, (slack - self._reach) // (1 + self._guide.growth))
            return
        self._restrict(mask, slack - 1, self._judged_for(mask, self._tokens, max(0, remaining - 2)))

    def _restrict(self, mask: Mask, most: int, judged: Judgement) -> None:
        following = next(iter(self._tokens or ()), -1)
        keeps = following >= 0 and bool(mask[following >> 5] >> (following & 31) & 1)
        if judged.plain is not None and judged.plain > most:
            np.bitwise_and(mask, ~self._classes.plain[: len(mask)], out=mask)
        _forbid(mask, judged.ids[judged.growth > most])
        if keeps:
            mask.view(np.uint32)[following >> 5] |= np.uint32(1 << (following & 31))

    def _judged_for(self, mask: Mask, ending: list[int], limit: int) -> Judgement:
        key = mask.tobytes()
        if not self._judged or self._judged[:2] != (key, ending):
            self._probe.allow(STEP_WORK)
            self._judged = (key, ending, self._judge(mask, ending, limit))
        return self._judged[2]

    def _judge(self, mask: Mask, ending: list[int], limit: int) -> Judgement:
        reads_text = self._search.reads_text(self._probe)
        is_plain = reads_text and self._search.reads_plain_text(self._probe)
        plain, reserve = None, RESERVE
        if is_plain:
            plain = 0
        elif reads_text and ending and self._guide.reserve:
            reserve = max(RESERVE, self._guide.reserve)
            plain = None if self._guide.literals or self._guide.controls else reserve
        judged = mask if plain is None else mask & ~self._classes.plain[: len(mask)]
        grouping = self._classes.by_marks if reads_text else self._classes.by_kind
        groups = grouping.of(judged)
        growth = [self._judge_alike(ids.tolist(), ending, limit, reserve) for ids in groups]
        ids = np.concatenate([np.zeros(0, dtype=np.intp), *groups])
        grown = np.array([grown for few in growth for grown in few], dtype=np.int64)
        if not ending and reads_text:
            grown[grown <= RESERVE] = -1  # the grammar may stop anywhere in this text
            plain = None if plain is None else -1
        return Judgement(ids, grown, plain)

    def _judge_alike(
        self, ids: list[int], ending: list[int], limit: int, reserve: int
    ) -> list[int]:
        if not self._probe.left:
            return [NEVER] * len(ids)
        if len(ids) > FEW:
            three = (ids[0], ids[len(ids) // 2], ids[-1])
            some = {self._cost_after(id, ending, limit) for id in three}
            if len(some) == 1 or len(ids) > 4 * FEW:
                return [max(some) + reserve] * len(ids)
        return [self._cost_after(id, ending, limit) for id in ids]

    def _cost_after(self, token: int, ending: list[int], limit: int) -> int:
        left = self._probe.left
        if not left or not self._probe.take([token]):
            return NEVER
        before = self._probe.work
        self._probe.allow(min(left, TOKEN_WORK))
        found = self._search.find(self._probe, ending, limit)
        self._probe.back(1)
        self._probe.allow(max(0, left - (self._probe.work - before) - CONSUMED))
        return NEVER if found is None else len(found) - len(ending)


def _forbid(mask: Mask, ids: Ids) -> None:
    bits = np.uint32(1) << (ids & 31).astype(np.uint32)
    np.bitwise_and.at(mask.view(np.uint32), ids >> 5, ~bits)
