"""Brings a row under a grammar to an end of the grammar before its token limit.

From any state of a matcher an ending can be found: tokens that lead to where the grammar may stop.
While there is room for much more than that, nothing is done. Later a token is only allowed if the
ending that would then be needed still fits, so that one always does: text and numbers go on as
long as there is room, new members and items come only where they can be finished, and at last what
is allowed is the ending itself.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from mlx_server.worker.constrained_decoding.token_classes import (
    BLANK,
    STARTS,
    Ids,
    Mask,
    TokenClasses,
)

REACH = 64
"""So many tokens above what its ending takes, a row is not restricted, unless the grammar has more
that one token can begin."""

WALK = 24
"""Choices, on the way to find out."""

FORCED = 128
"""Tokens between two of them, at most: many where tokens are short."""

HINTS = 64

TAILS = 5
"""One token can do the work of so many tokens of an ending, less one."""

SPAN = 32
"""As many tokens of an ending are tried to be left out at once."""

MANY = 192
"""Where more tokens are allowed, those of one kind are judged by a few of them."""

TRIED = 32
"""Tokens that are looked at for one that ends it all."""

FEW = 8
RESERVE = 2
"""By so much the others may be worse than those few."""

STEPS = 600
"""Of simulation, in one look at a row."""

FIRST_STEPS = 4000
"""In a look that keeps no row waiting."""

NEVER = 1 << 20


@dataclass(frozen=True)
class CompletionHints:
    """What is known of endings before a row begins, the same for all rows of a grammar."""

    hints: Sequence[list[int]] = ()
    tokens: list[int] | None = None
    """An ending from the very beginning."""
    reach: int = REACH
    """When a row has so much more room than its ending takes, nothing needs to be forbidden."""


def completion_hints(
    classes: TokenClasses, matcher: LLMatcher, grammar: str = ""
) -> CompletionHints:
    """matcher: one that has read nothing; it is not changed. grammar: what it was made of, in
    Lark. Takes up to some ten milliseconds, so not on the thread that steps rows."""
    marks = dict.fromkeys(re.findall(r"<\[(\d+)\]>", grammar))
    spelled = [way for text in _literal_hints(grammar) if (way := classes.cut(text))]
    hints = [*_control_hints(classes, grammar), *([int(id)] for id in marks), *spelled][:HINTS]
    row = GrammarCompletion(classes, CompletionHints(hints))
    tokens = row.shortest(matcher, FIRST_STEPS)
    return CompletionHints(hints, tokens, max(REACH, 2 * row.explore(matcher)))


def _control_hints(pieces: TokenClasses, grammar: str) -> list[list[int]]:
    """Marks of a control token, a text and another one."""
    found = re.findall(r'<\[(\d+)\]> ("(?:[^"\\]|\\.)+") <\[(\d+)\]>', grammar)
    cut = ((b, pieces.cut(_spelled(text).encode()), e) for b, text, e in dict.fromkeys(found))
    return [[int(begin), *way, int(end)] for begin, way, end in cut if way]


def _literal_hints(grammar: str) -> list[bytes]:
    """The texts that a grammar spells out, such as closing tags: where it reads free text,
    nothing else tells what may end it."""
    own = [line for line in grammar.splitlines() if "%json" not in line and line[:1] != "%"]
    # quotes inside of regular expressions are none
    found = re.findall(r'/(?:[^/\\]|\\.)+/|("(?:[^"\\]|\\.)+")', "\n".join(own))
    texts = (_spelled(text) for text in dict.fromkeys(found) if text)
    return [text.encode() for text in texts if text]


def _spelled(text: str) -> str:
    """Nothing where a client wrote it in other words than JSON's."""
    try:
        found: str = json.loads(text)
        found.encode()
    except ValueError:
        return ""
    return found


class GrammarCompletion:
    """Of one row."""

    def __init__(self, pieces: TokenClasses, prospect: CompletionHints | None = None) -> None:
        known = prospect or CompletionHints()
        self._classes = pieces
        self._hints = known.hints
        self._tokens = known.tokens
        self._reach = known.reach
        self._next = NEVER * NEVER
        self._steps = 0
        self._judged: tuple[bytes, list[int], Ids, NDArray[np.int64]] | None = None

    def allow(self, matcher: LLMatcher, mask: Mask, remaining: int) -> None:
        """Takes from the matcher's present mask what would leave no room for an ending.
        remaining: how many tokens the row may still get, the coming one and a stop token too."""
        if remaining > self._next:
            return
        self._tokens = self.shortest(matcher)
        if self._tokens is None or len(self._tokens) >= remaining:
            self._next = remaining * 3 // 4
            return
        slack = remaining - 1 - len(self._tokens)
        if slack > self._reach:
            self._next = remaining - (slack - self._reach + 1) // 2
            return
        ids, growth = self._judge(matcher, mask, remaining - 2)
        _take(mask, ids[growth > slack - 1])

    def explore(self, matcher: LLMatcher) -> int:
        """Goes where endings grow the most, and returns by how much one token can lengthen
        them."""
        matcher = matcher.deep_copy()
        most = 0
        for _ in range(WALK):
            self._pass_forced(matcher)
            self._tokens = self.shortest(matcher)
            if self._tokens is None:
                break
            following = self._tokens[0] if self._tokens else None
            if not self._reads_text(matcher):
                mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
                ids, growth = self._judge(matcher, mask, FIRST_STEPS)
                growth = np.where(growth > FIRST_STEPS, 0, growth)
                if (largest := int(growth.max(initial=0))) > RESERVE:
                    most = max(most, largest)
                    following = int(ids[growth.argmax()])
            if following is None:
                break
            matcher.consume_token(following)
        return most

    def _pass_forced(self, matcher: LLMatcher) -> None:
        for _ in range(FORCED):
            ids = self._classes.allowed(np.frombuffer(matcher.compute_bitmask(), dtype=np.int32))
            if len(ids) != 1 or matcher.is_accepting():
                return
            matcher.consume_token(int(ids[0]))
            self._tokens = self._tokens and self._tokens[1:]

    def shortest(self, matcher: LLMatcher, steps: int = STEPS) -> list[int] | None:
        """A short way, not always the shortest, to where the grammar may stop."""
        self._steps = steps
        found = self._after(matcher, NEVER)
        return self._shrink(matcher.deep_copy(), found) if found else found

    def _shrink(self, matcher: LLMatcher, path: list[int]) -> list[int]:
        """Without what can be left out: members, items, text that was tried."""
        new = len(path) - _alike(path, self._tokens or [])
        short: list[int] = []
        at = 0
        while at < new:
            mask = matcher.compute_bitmask()
            for after in range(min(new, at + SPAN), at, -1):
                if after < len(path) and not mask[path[after] >> 3] >> (path[after] & 7) & 1:
                    continue
                rest = [*path[after:], self._classes.stop]
                if matcher.validate_tokens(rest) == len(rest):
                    at = after
                    break
            else:
                matcher.consume_token(path[at])
                short.append(path[at])
                at += 1
        return short + path[at:]

    def _judge(self, matcher: LLMatcher, mask: Mask, limit: int) -> tuple[Ids, NDArray[np.int64]]:
        """By how much each allowed token lengthens the ending; following it is -1."""
        assert self._tokens is not None
        key = mask.tobytes()
        if self._judged and self._judged[:2] == (key, self._tokens):
            return self._judged[2:]
        self._steps = STEPS
        ids = self._classes.allowed(mask)
        growth = np.zeros(len(ids), dtype=np.int64)
        kinds = self._classes.kind[ids]
        order = np.argsort(kinds, kind="stable")
        edges = np.flatnonzero(np.diff(kinds[order])) + 1
        for group in np.split(order, edges):
            growth[group] = self._judge_alike(matcher, ids[group].tolist(), limit)
        growth[ids == next(iter(self._tokens), -1)] = -1
        if not self._tokens and self._reads_text(matcher):
            growth[growth <= RESERVE] = -1  # text that may stop anywhere may also be cut
        self._judged = (key, self._tokens, ids, growth)
        return ids, growth

    def _judge_alike(self, matcher: LLMatcher, ids: list[int], limit: int) -> list[int] | int:
        if len(ids) > FEW:
            three = (ids[0], ids[len(ids) // 2], ids[-1])
            some = {self._cost_after(matcher, id, limit) for id in three}
            if len(some) == 1 or len(ids) > 4 * FEW:
                return max(some) + RESERVE
        return [self._cost_after(matcher, id, limit) for id in ids]

    def _cost_after(self, matcher: LLMatcher, token: int, limit: int) -> int:
        assert self._tokens is not None
        after = matcher.deep_copy()
        after.consume_token(token)
        found = self._after(after, limit)
        return NEVER if found is None else len(found) - len(self._tokens)

    def _after(self, matcher: LLMatcher, limit: int) -> list[int] | None:
        """The ending of a state that one token has led to. The known one, or what is left of it,
        is often still right."""
        if matcher.is_accepting():
            return []
        known = self._tokens or []
        tails = [[*known[n:], self._classes.stop] for n in range(min(TAILS, len(known)))][::-1]
        return self._search(matcher.deep_copy(), tails, limit)

    def _search(self, matcher: LLMatcher, tails: list[list[int]], limit: int) -> list[int] | None:
        path: list[int] = []
        used: Counter[int] = Counter()
        while len(path) <= limit:
            if matcher.is_accepting():
                return path
            for tail in tails:
                if matcher.validate_tokens(tail) == len(tail):
                    return path + tail[:-1] if len(path) + len(tail) - 1 <= limit else None
            self._steps -= 1
            step = self._step(matcher, used) if self._steps > 0 else []
            if not step or not matcher.consume_tokens(step):
                return None
            path += step
        return None

    def _step(self, matcher: LLMatcher, used: Counter[int]) -> list[int]:
        """What leads nearer to an end."""
        if self._reads_text(matcher):
            return self._leave(matcher) or self._fill(matcher, used)
        return self._close(matcher) or self._part(matcher) or self._fill(matcher, used)

    def _reads_text(self, matcher: LLMatcher) -> bool:
        prose = self._classes.prose
        return bool(prose) and all(matcher.validate_tokens([id]) for id in prose)

    def _leave(self, matcher: LLMatcher) -> list[int]:
        """Out of free text."""
        quotes = [[quote] for quote, _ in self._classes.quotes]
        for way in [*quotes, *self._hints]:
            if matcher.validate_tokens(way) == len(way):
                after = matcher.deep_copy()
                after.consume_tokens(way)
                if after.is_accepting() or not self._reads_text(after):
                    return way
        return []

    def _close(self, matcher: LLMatcher) -> list[int]:
        for id in self._classes.closers:
            if matcher.validate_tokens([id]):
                return [id]
        for quote, closing in self._classes.quotes:
            if self._closes(matcher, quote):
                return next([id] for id in closing if matcher.validate_tokens([id]))
        if any(self._parts(matcher, id) for id in self._classes.parting):
            return []
        return next(([id] for id in self._classes.small if self._stands(matcher, id)), [])

    def _parts(self, matcher: LLMatcher, id: int) -> bool:
        return bool(matcher.validate_tokens([id])) and self._no_text(matcher, [id])

    def _no_text(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """Whether they may follow, and text may not follow them."""
        on = [[*tokens, id] for id in self._classes.prose] or [tokens]
        return min(map(matcher.validate_tokens, on)) == len(tokens)

    def _stands(self, matcher: LLMatcher, id: int) -> bool:
        """Whether this is a whole value here, and not the beginning of some text."""
        return bool(matcher.validate_tokens([id])) and (
            any(matcher.validate_tokens([id, after]) == 2 for after in self._classes.after)
            and self._no_text(matcher, [id])
        )

    def _closes(self, matcher: LLMatcher, quote: int) -> bool:
        """Whether a quote ends a text here; it may also begin one."""
        return bool(matcher.validate_tokens([quote])) and not any(
            matcher.validate_tokens([quote, id]) == 2 for id in [quote, *self._classes.prose]
        )

    def _part(self, matcher: LLMatcher) -> list[int]:
        """A value is complete, and more are wanted."""
        found = (id for id in self._classes.parting if self._parts(matcher, id))
        return next(([id] for id in found), [])

    def _continues(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """Whether what they end may end there: no name that is forced begins with them."""
        behind = (*self._classes.after, *self._classes.colon)
        size = len(tokens) + 1
        return any(matcher.validate_tokens([*tokens, id]) == size for id in behind)

    def _peek(self, matcher: LLMatcher) -> list[int]:
        """The one character that a pattern waits for before its text may end."""
        for quote, _ in self._classes.quotes:
            if not matcher.validate_tokens([quote]):
                for id in self._classes.single:
                    way = [id, quote]
                    if self._no_text(matcher, way) and self._continues(matcher, way):
                        return way
        return []

    def _fill(self, matcher: LLMatcher, used: Counter[int]) -> list[int]:
        """Text that is wanted. Of several, what begins as nothing before: whatever a pattern or
        a recursive schema waits for comes soon, and forced text comes in long tokens."""
        pieces = self._classes
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        if np.count_nonzero(mask) > MANY:
            fillers = pieces.fillers
            ids = fillers[(mask[fillers >> 5] >> (fillers & 31)) & 1 != 0]
        else:
            ids = pieces.allowed(mask)
        if len(ids) > FEW and (close := self._peek(matcher)):
            return close
        dense = ids[pieces.start[ids] < BLANK]
        ids = dense if len(dense) else ids
        if not len(ids):
            return []
        # a longer token may hold the end and what goes on behind it
        ends = (
            id for id in ids[:TRIED].tolist() if matcher.validate_tokens([id, pieces.stop]) == 2
        )
        if (last := next(ends, None)) is not None:
            return [last]
        starts = pieces.start[ids]
        score = pieces.cost[ids]
        for key, times in used.items():
            if key < STARTS:
                score += 64 * times * (starts == key)
            elif times > 2:
                score += 64 * (times // 3) * (ids == key - STARTS)
        best = int(score.argmin())
        token = int(ids[best])
        if not pieces.linking[token]:
            used[starts[best]] += 1
            used[token + STARTS] += 1
        return [token]


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of their last tokens are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _take(mask: Mask, ids: Ids) -> None:
    bits = np.uint32(1) << (ids & 31).astype(np.uint32)
    np.bitwise_and.at(mask.view(np.uint32), ids >> 5, ~bits)
