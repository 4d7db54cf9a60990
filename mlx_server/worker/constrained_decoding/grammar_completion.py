"""Completes a row's JSON before the row reaches its token limit.

The schemas of a grammar propose texts on the way to the end of the JSON where a row stands (see
json_texts.py); those that the matcher accepts, one after another, are the row's ending. While far
more tokens are left than the ending needs, nothing is restricted. Later a token is allowed only if
the ending that it would require still fits. So strings and numbers continue while there is room,
new members and items begin only where they can be finished, and in the end only the ending itself
is allowed. Text outside of JSON, and what other grammars allow, is not restricted: it may be cut.

An example, with tokens of one byte and a required `name` and `age`: after `{"name":"An` the ending
is `","age":0}`, which is 10 tokens and the stop token.

    tokens left   allowed next
    100           all that the grammar allows: the ending is not even searched
    12            `n` (11 tokens are left, as the ending needs)
    11            `"` only, with which the ending begins
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, takewhile

import numpy as np

from mlx_server.engine.messages import Grammar
from mlx_server.worker.constrained_decoding.json_texts import JsonText, SchemaTexts
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher
from mlx_server.worker.constrained_decoding.vocabulary import Ids, Mask, TokenClasses, missing_bytes

MARGIN = 8
"""A row is restricted up to this many tokens before what its ending and a token may need."""
UNKNOWN = 64
"""The tokens that are left for the ending of a grammar before it is known."""
STEP_CALLS = 400
"""The calls of the matcher between two of a row's tokens, each of one or two microseconds."""
LOOP_CALLS = 4000
"""The calls of the matcher to end a text that repeats itself."""
MASK_CALLS = 50
"""What it costs to compute a mask, in such calls."""
FEW = 4
"""Of a larger group of similar tokens three are tried for all."""
RESERVE = 4
"""The tokens by which others of a group may need more than those that were tried, and one character
more of a text that is still too short."""
LONGEST_ENDING = 256
"""The most tokens of an ending that takes the place of what a row repeats."""
MOST_TOKENS = 4000
"""The most tokens of an ending, as it is searched."""
MOST_PENDING = 24
"""The most tokens about which the matcher is asked before it consumes them."""
LONGEST_TAIL = 64
"""The most tokens after the JSON."""
TAILS = 8
"""The most times that what comes after a grammar's JSON is searched."""
NARROW = 16
"""The members of an object from which on each call of the matcher costs more."""
NEVER = 1 << 60

CONTINUATIONS = (b"\x80", b"\xa0", b"\x90")
"""Bytes that continue a character which a token began; one of them always may."""


@dataclass
class CompletionHints:
    """What is known of a grammar's endings, shared by all of its rows."""

    texts: SchemaTexts | None
    """None for a grammar without schemas."""
    is_framed: bool
    """Whether there is text around the JSON."""
    growth: int = 0
    """The number of tokens by which a single token may lengthen the shortest ending."""
    call: int = 1
    """The cost of a call: with many members in an object the matcher reads hundreds of items."""
    tokens: list[int] | None = None
    """An ending from the grammar's start; None if none is known."""
    tails: list[list[int]] = field(default_factory=list)
    """What came after the JSON of earlier endings."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """The tokens of proposed texts."""

    def next_search(self, remaining: int, ending: list[int] | None) -> int:
        """Returns how many tokens are left when an ending has to be known next. ending: the present
        one, None if it is not known."""
        need = UNKNOWN + self.growth if ending is None else len(ending)
        slack, reach = remaining - 1 - need, self.growth + MARGIN
        if slack <= reach:
            return remaining
        return remaining - max(1, (slack - reach) // (1 + self.growth))


UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a schema that says something unusual may raise: it has no endings then."""


def completion_hints(
    grammar: Grammar, classes: TokenClasses, matcher: YieldingMatcher, begun: Sequence[int] = ()
) -> CompletionHints:
    """matcher: in its initial state, where it stays. begun: the tokens that it has accepted
    already."""
    texts = None
    with suppress(*UNREADABLE):
        roots = {name: json.loads(schema) for name, schema in grammar.schemas}
        frames = ((json.loads(frame), roots[name]) for name, frame in grammar.frames)
        texts = SchemaTexts([*roots.values()], frames)
    if not grammar.schemas or texts is None:
        return CompletionHints(None, is_framed=True)
    growth = max((len(classes.cut(text.encode())) for text in texts.inner), default=0)
    call = 1 if texts.width <= NARROW else texts.width // 5
    hints = CompletionHints(texts, not grammar.is_schema, growth, call)
    text = JsonText()
    text.read(b"".join(map(classes.text_of, begun)))
    hints.tokens = EndingSearch(hints, classes, matcher, 4 * STEP_CALLS * call).ending(text)
    return hints


class EndingSearch:
    """Searches endings from one state of a matcher, at a cost that is counted in its calls: so an
    answer does not depend on how busy the machine is."""

    def __init__(
        self, hints: CompletionHints, classes: TokenClasses, matcher: YieldingMatcher, calls: int
    ) -> None:
        self._hints, self._classes, self._matcher = hints, classes, matcher
        self._left = calls
        self._consumed = 0

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def fits(self, tokens: list[int]) -> bool:
        """Whether the tokens may come next, one after another."""
        if self.is_spent:
            return False
        count = self._matcher.validate_tokens(tokens)
        self._left -= self._hints.call * (1 + count // 8)
        return count == len(tokens)

    def ending(self, text: JsonText, begun: Sequence[int] = ()) -> list[int] | None:
        """Returns a short ending after the tokens `begun`, which the text has."""
        taken, text, tail = [*begun], text.after(b""), NEVER
        try:
            while not self._may_end(taken, text):
                parts = self._parts(taken, text) if tail == NEVER else iter(())
                if (part := next(parts, None)) is None:
                    part = self._closing(taken, text.controls, tail)
                    if text.is_between:
                        tail = min(tail, len(taken))
                if not part or len(taken) > min(MOST_TOKENS, tail + LONGEST_TAIL):
                    return None
                taken += part
                text.read(b"".join(map(self._classes.text_of, part)))
                text.controls += tuple(self._classes.apart.intersection(part))
        finally:
            self._matcher.own.rollback(self._consumed)
            self._consumed = 0
        if tail != NEVER:
            self._hints.tails.append(self._classes.joined(taken[tail:]))
        ending = taken[len(begun) :]
        joined = self._classes.joined(ending)
        return joined if joined != ending and self.fits([*begun, *joined]) else ending

    def _may_end(self, taken: list[int], text: JsonText) -> bool:
        """Whether the answer may end after these tokens."""
        if len(taken) - self._consumed > MOST_PENDING:
            self._consume(taken)
        if len(taken) == self._consumed:
            return self._matcher.own.is_accepting()
        return text.begun is None and self._follows(taken, [self._classes.stop])

    def _follows(self, taken: list[int], part: list[int]) -> bool:
        return self.fits([*taken[self._consumed :], *part])

    def _consume(self, taken: list[int]) -> None:
        """Lets the matcher consume the tokens, which costs more than to ask it about a few."""
        self._left -= len(taken) - self._consumed
        self._matcher.consume_tokens(taken[self._consumed :])
        self._consumed = len(taken)

    def _parts(self, taken: list[int], text: JsonText) -> Iterator[list[int]]:
        """Yields tokens that may come next on the way to the end."""
        parts: Iterable[list[int]] = self._hints.tails if text.is_between else ()
        if missing_bytes(text.begun or b""):
            parts = ([id] for byte in CONTINUATIONS if (id := self._classes.ids.get(byte)))
        elif self._hints.texts:
            parts = chain(parts, map(self._cut, self._hints.texts.proposals(text)))
        for part in parts:
            if self.is_spent:
                return
            if part and self._follows(taken, part):
                yield part

    def _cut(self, text: str) -> list[int]:
        if text not in self._hints.cuts:
            self._hints.cuts[text] = self._classes.cut(text.encode())
        return self._hints.cuts[text]

    def _closing(self, taken: list[int], controls: Sequence[int], tail: int) -> list[int] | None:
        """Returns the token that may come next, of brackets, control tokens and quotes first, and
        white space last. What ends a grammar's answers is searched a few times at any cost.

        controls: the control tokens before. The rarest of them closes what others have opened."""
        if tail == NEVER or len(self._hints.tails) >= TAILS:
            self._left -= MASK_CALLS
        if self.is_spent:
            return None
        self._consume(taken)
        matcher = self._matcher.own.deep_copy()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = [id for id in self._classes.closing if mask[id >> 3] >> (id & 7) & 1]
        if matcher.is_error() or not allowed:
            return None
        if allowed[0] in self._classes.apart:
            return [min(self._classes.apart.intersection(allowed), key=controls.count)]
        return allowed[:1]


class GrammarCompletion:
    """Restricts one row's tokens so that its JSON can be completed within the token limit."""

    def __init__(
        self, classes: TokenClasses, hints: CompletionHints, begun: Sequence[int] = ()
    ) -> None:
        """begun: the tokens that the grammar accepted before the row's own."""
        self._classes, self._hints = classes, hints
        self._text = JsonText()
        self._tokens = hints.tokens
        """The latest ending that was found; None if there was none."""
        self._fits = hints.tokens is not None
        """Whether that ending completes the grammar from the present state."""
        self._next = NEVER
        """The remaining tokens at which the next search is due."""
        self._endings: dict[int, list[int]] = {}
        """The endings that were found after some of the tokens that may come next."""
        self._probe: YieldingMatcher | None = None
        for token in begun:
            self._read(token)

    @property
    def ending(self) -> list[int] | None:
        """The ending that `allow` found last; None if there was none."""
        return self._tokens if self._fits else None

    def advance(self, token: int) -> None:
        """Follows the row's latest token."""
        self._read(token)
        if self._fits and self._tokens and self._tokens[0] == token:
            self._tokens = self._tokens[1:]
        else:
            self._tokens = self._endings.get(token)
            self._fits = self._tokens is not None
        self._endings = {}

    def copy(self) -> "GrammarCompletion":
        """Returns a copy that advances by itself."""
        completion = copy(self)
        completion._text, completion._endings = self._text.after(b""), {**self._endings}
        return completion

    def abandon(self) -> None:
        """Ends a search that another thread may be making."""
        if self._probe:
            self._probe.is_abandoned = True

    def extend(self) -> None:
        """Begins with a new token limit."""
        self._next = NEVER

    def allow(self, mask: Mask, remaining: int, matcher: YieldingMatcher) -> None:
        """Removes the tokens from the matcher's present mask that would leave no room for an
        ending. remaining: the tokens left to the row, including the next one and a stop token."""
        if not self._hints.texts:
            return
        if self._next == NEVER:
            self._next = self._hints.next_search(remaining, self.ending)
        if remaining > self._next:
            return
        self._next = self._hints.next_search(remaining, self.ending)
        if self._next < remaining and self._fits:
            return
        if self._hints.is_framed and (not self._text.is_opened or matcher.own.is_accepting()):
            self._tokens, self._fits = None, False
            self._next = min(self._next, remaining - 1)
            return
        search = self._found(matcher)
        if self._tokens is None or len(self._tokens) >= remaining:
            self._next = remaining - 1 - remaining // 8
            return
        self._next = self._hints.next_search(remaining, self._tokens)
        if self._next >= remaining:
            self._restrict(mask, self._tokens, remaining - 2 - len(self._tokens), search)

    def end(self, mask: Mask, matcher: YieldingMatcher) -> bool:
        """Removes all tokens but the ending's first one from the mask. Returns False if no ending
        is known, or only one that is so long that the grammar demands what the row writes."""
        self._found(matcher, LOOP_CALLS)
        ending = self._tokens
        if ending is None or len(ending) > LONGEST_ENDING:
            return False
        only = np.zeros_like(mask)
        _allow(only, ending[:1] or self._classes.stops)
        if not (mask & only).any():
            return False
        mask &= only
        return True

    def _found(self, matcher: YieldingMatcher, calls: int = STEP_CALLS) -> EndingSearch:
        """Finds an ending from the present state, unless the latest one fits."""
        self._probe = matcher.copy()
        search = EndingSearch(self._hints, self._classes, self._probe, calls)
        if not self._fits:
            self._tokens = search.ending(self._text)
            self._fits = self._tokens is not None
        return search

    def _read(self, token: int) -> None:
        if token in self._classes.apart:
            self._text = JsonText((*self._text.controls, token))
        else:
            self._text.read(self._classes.text_of(token))

    def _restrict(self, mask: Mask, ending: list[int], room: int, search: EndingSearch) -> None:
        """room: the tokens that may come before or lengthen the ending after the next token."""
        classes, allowed = self._classes, mask.copy()
        mask[:] = 0
        _allow(mask, [*ending[:1], *(() if ending else classes.stops)])
        if room >= 0:
            _allow(mask, self._leading_to(ending, room + len(ending)))
            plain = classes.plain[: len(mask)]
            # in a free text, nine tenths of the plain tokens are allowed
            part, whole = (int(np.bitwise_count(m).sum()) for m in (allowed & plain, plain))
            is_free = self._text.begun is not None and 10 * part >= 9 * whole
            is_too_short = is_free and not classes.text_of((*ending, 0)[0]).startswith(b'"')
            if room >= RESERVE * is_too_short:
                if is_free:
                    mask |= allowed & plain
                for ids in self._fitting(allowed & ~mask, ending, room, search):
                    _allow(mask, ids)
        mask &= allowed

    def _leading_to(self, ending: list[int], most: int) -> Iterator[int]:
        """Yields the tokens that begin the ending's text, perhaps with more of a string before it,
        where the rest takes at most so many tokens."""
        run = [*takewhile(lambda token: token not in self._classes.apart, ending)]
        text = b"".join(map(self._classes.text_of, run))
        for size, ids in self._classes.beginnings(text):
            rest = self._classes.cut(text[size:])
            if len(rest) + len(ending) - len(run) <= most:
                yield from ids

    def _fitting(
        self, mask: Mask, ending: list[int], room: int, search: EndingSearch
    ) -> Iterator[Ids | list[int]]:
        """Yields tokens after which an ending fits, as far as the search's calls allow."""
        stop, ink = self._classes.stop, self._classes.ink
        changing = list[tuple[Ids, list[int]]]()
        for ids in sorted(self._classes.by_kind(mask), key=lambda ids: ink[ids].min()):
            some = (ids if len(ids) <= FEW else ids[[0, len(ids) // 2, -1]]).tolist()
            if all(search.fits([token, *ending, stop]) for token in some):
                yield ids
            else:
                changing.append((ids, some))
        for ids, some in changing:
            if search.is_spent:
                return
            growths = [self._growth(token, ending, search) for token in some]
            if len(ids) > FEW and max(growths) + RESERVE <= room:
                yield ids
            else:
                yield [token for token, growth in zip(some, growths, strict=True) if growth <= room]

    def _growth(self, token: int, ending: list[int], search: EndingSearch) -> float:
        """Returns by how many tokens this one lengthens the ending."""
        rest = search.ending(self._text.after(self._classes.text_of(token)), [token])
        if rest is None:
            return float("inf")
        self._endings[token] = rest
        return len(rest) - len(ending)


def _allow(mask: Mask, tokens: Iterable[int]) -> None:
    ids = tokens if isinstance(tokens, np.ndarray) else np.array([*tokens], dtype=np.intp)
    bits = np.uint32(1) << (ids & 31).astype(np.uint32)
    np.bitwise_or.at(mask.view(np.uint32), ids >> 5, bits)
