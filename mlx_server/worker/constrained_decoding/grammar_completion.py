"""Completes a row's grammar before the row reaches its token limit.

From any state of a matcher an ending can be searched: tokens that lead to where the grammar may
stop. While far more tokens are left than the ending needs, nothing is restricted. Later a token is
allowed only if the ending that it would require still fits. So text and numbers continue while
there is room, new members and items begin only where they can be finished, and in the end only the
ending itself is allowed.
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
"""A row with this many tokens more than its ending needs is not restricted, unless one token of the
grammar can lengthen the ending by more (see `CompletionHints.reach`)."""

WALK = 24
"""Choices that `explore` makes at most."""

FORCED = 128
"""Forced tokens that `explore` passes at most between two choices."""

HINTS = 64
"""Token sequences that are tried as ends of free text, at most."""

TAILS = 5
"""The known ending is tried again without its first 0 to TAILS - 1 tokens."""

SPAN = 32
"""The most tokens of an ending that are left out at once when it is shortened."""

MANY = 192
"""Where more tokens than this are allowed, filler text is chosen from `TokenClasses.fillers`."""

TRIED = 32
"""The number of filler tokens that are tried as the last token of the answer."""

FEW = 8
"""In a class of more tokens than this, a sample of three stands for all."""

RESERVE = 2
"""Tokens by which the others of a class may lengthen the ending more than the sample."""

STEPS = 600
"""Simulated tokens per search while rows wait."""

FIRST_STEPS = 4000
"""Simulated tokens per search at compile time, when no row waits."""

NEVER = 1 << 20
"""The cost of a token after which no ending was found."""


@dataclass(frozen=True)
class CompletionHints:
    """What was found out about a grammar's endings at compile time, shared by all of its rows."""

    hints: Sequence[list[int]] = ()
    """Token sequences that may end free text."""
    tokens: list[int] | None = None
    """An ending from the grammar's start; None if none was found."""
    reach: int = REACH
    """A row with this many tokens more than its ending needs is not restricted."""


def completion_hints(
    classes: TokenClasses, matcher: LLMatcher, grammar: str = ""
) -> CompletionHints:
    """Searches the grammar's endings. It takes tens of milliseconds, so not on the MLX thread.

    matcher: in its initial state; it is not changed. grammar: its source in Lark.
    """
    control_ids = dict.fromkeys(re.findall(r"<\[(\d+)\]>", grammar))
    texts = [*_line_hints(grammar), *_literal_hints(grammar)]
    spelled = [way for text in texts if (way := classes.cut(text))]
    hints = [*_control_hints(classes, grammar), *([int(id)] for id in control_ids), *spelled]
    hints = hints[:HINTS]
    row = GrammarCompletion(classes, CompletionHints(hints))
    tokens = row.shortest(matcher, FIRST_STEPS)
    return CompletionHints(hints, tokens, max(REACH, 2 * row.explore(matcher)))


def _control_hints(classes: TokenClasses, grammar: str) -> list[list[int]]:
    """Returns delimiters that consist of a control token, a text and another control token."""
    found = re.findall(r'<\[(\d+)\]> ("(?:[^"\\]|\\.)+") <\[(\d+)\]>', grammar)
    cut = ((b, classes.cut(_spelled(text).encode()), e) for b, text, e in dict.fromkeys(found))
    return [[int(begin), *way, int(end)] for begin, way, end in cut if way]


def _line_hints(grammar: str) -> list[bytes]:
    """Returns the end of a line within JSON, if the pattern of a string has lines. A search would
    hardly find its two characters among all that a line may contain."""
    lines = (line for line in grammar.splitlines() if "%json" in line)
    return [rb"\n"] if any('"pattern"' in line and r"\\n" in line for line in lines) else []


def _literal_hints(grammar: str) -> list[bytes]:
    """Returns the string literals of a grammar, such as closing tags, which may end free text."""
    own = [line for line in grammar.splitlines() if "%json" not in line and line[:1] != "%"]
    # The first alternative skips regular expressions, whose quotes begin no literal.
    found = re.findall(r'/(?:[^/\\]|\\.)+/|("(?:[^"\\]|\\.)+")', "\n".join(own))
    texts = (_spelled(text) for text in dict.fromkeys(found) if text)
    return [text.encode() for text in texts if text]


def _spelled(text: str) -> str:
    """Decodes a Lark string; returns "" where a client used an escape that JSON does not have."""
    try:
        found: str = json.loads(text)
        found.encode()
    except ValueError:
        return ""
    return found


class GrammarCompletion:
    """Restricts one row's tokens so that its grammar can be completed within the token limit."""

    def __init__(self, classes: TokenClasses, hints: CompletionHints | None = None) -> None:
        known = hints or CompletionHints()
        self._classes = classes
        self._hints = known.hints
        self._tokens = known.tokens
        """The latest ending that was found; None if there was none."""
        self._reach = known.reach
        self._next = NEVER * NEVER
        """The remaining tokens at which the next search is due."""
        self._steps = 0
        """Simulated tokens left in the present search."""
        self._judged: tuple[bytes, list[int], Ids, NDArray[np.int64]] | None = None
        """The latest result of `_judge`, with the mask and the ending that it was made for."""

    @property
    def ending(self) -> list[int] | None:
        """The ending that `allow` found last; None if there was none."""
        return self._tokens

    def allow(self, matcher: LLMatcher, mask: Mask, remaining: int) -> None:
        """Removes the tokens from the matcher's present mask that would leave no room for an
        ending. remaining: the tokens left to the row, including the next one and a stop token."""
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
        _forbid(mask, ids[growth > slack - 1])

    def explore(self, matcher: LLMatcher) -> int:
        """Follows the tokens that lengthen the ending most, and returns by how much one did."""
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
        """Returns a short ending, not always the shortest; None if none was found."""
        self._steps = steps
        found = self._after(matcher, NEVER)
        return self._shrink(matcher.deep_copy(), found) if found else found

    def _shrink(self, matcher: LLMatcher, path: list[int]) -> list[int]:
        """Leaves out the optional parts of an ending: members, items and filler text."""
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
        """Returns the allowed tokens, and by how many tokens each lengthens the ending; -1 is the
        ending's own next token."""
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
            growth[growth <= RESERVE] = -1  # the grammar may stop anywhere in this text
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
        """Returns an ending from the state after one more token. The known ending, or a tail of
        it, is tried first, since it often still applies."""
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
        """Returns tokens that lead closer to an end, [] if none are known."""
        if self._reads_text(matcher):
            return self._leave(matcher) or self._fill(matcher, used)
        return self._close(matcher) or self._part(matcher) or self._fill(matcher, used)

    def _reads_text(self, matcher: LLMatcher) -> bool:
        prose = self._classes.prose
        return bool(prose) and all(matcher.validate_tokens([id]) for id in prose)

    def _leave(self, matcher: LLMatcher) -> list[int]:
        """Returns tokens that end free text."""
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
        """Whether the tokens may follow and free text may not follow them."""
        on = [[*tokens, id] for id in self._classes.prose] or [tokens]
        return min(map(matcher.validate_tokens, on)) == len(tokens)

    def _stands(self, matcher: LLMatcher, id: int) -> bool:
        """Whether the token is a complete value here, rather than the beginning of free text."""
        return bool(matcher.validate_tokens([id])) and (
            any(matcher.validate_tokens([id, after]) == 2 for after in self._classes.after)
            and self._no_text(matcher, [id])
        )

    def _closes(self, matcher: LLMatcher, quote: int) -> bool:
        """Whether a quote ends a string here, rather than begins one."""
        return bool(matcher.validate_tokens([quote])) and not any(
            matcher.validate_tokens([quote, id]) == 2 for id in [quote, *self._classes.prose]
        )

    def _part(self, matcher: LLMatcher) -> list[int]:
        """Returns a comma where a value is complete and another one is required."""
        found = (id for id in self._classes.parting if self._parts(matcher, id))
        return next(([id] for id in found), [])

    def _continues(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """Whether a delimiter may follow the tokens; it may not inside a longer required name."""
        delimiters = (*self._classes.after, *self._classes.colon)
        size = len(tokens) + 1
        return any(matcher.validate_tokens([*tokens, id]) == size for id in delimiters)

    def _peek(self, matcher: LLMatcher) -> list[int]:
        """Returns the one character that a pattern requires before its string may end, and the
        closing quote."""
        for quote, _ in self._classes.quotes:
            if not matcher.validate_tokens([quote]):
                for id in self._classes.single:
                    way = [id, quote]
                    if self._no_text(matcher, way) and self._continues(matcher, way):
                        return way
        return []

    def _fill(self, matcher: LLMatcher, used: Counter[int]) -> list[int]:
        """Returns a token of required text. Of several, it prefers beginnings that were not used
        before, so that what a pattern or a recursive schema requires comes soon."""
        classes = self._classes
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        if np.count_nonzero(mask) > MANY:
            fillers = classes.fillers
            ids = fillers[(mask[fillers >> 5] >> (fillers & 31)) & 1 != 0]
        else:
            ids = classes.allowed(mask)
        if len(ids) > FEW and (close := self._peek(matcher)):
            return close
        dense = ids[classes.start[ids] < BLANK]
        ids = dense if len(dense) else ids
        if not len(ids):
            return []
        # A longer token may contain the end together with what follows it.
        ends = (
            id for id in ids[:TRIED].tolist() if matcher.validate_tokens([id, classes.stop]) == 2
        )
        if (last := next(ends, None)) is not None:
            return [last]
        starts = classes.start[ids]
        score = classes.cost[ids]
        for key, times in used.items():
            if key < STARTS:
                score += 64 * times * (starts == key)
            elif times > 2:
                score += 64 * (times // 3) * (ids == key - STARTS)
        best = int(score.argmin())
        token = int(ids[best])
        if not classes.linking[token]:
            used[starts[best]] += 1
            used[token + STARTS] += 1
        return [token]


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common suffix."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _forbid(mask: Mask, ids: Ids) -> None:
    bits = np.uint32(1) << (ids & 31).astype(np.uint32)
    np.bitwise_and.at(mask.view(np.uint32), ids >> 5, ~bits)
