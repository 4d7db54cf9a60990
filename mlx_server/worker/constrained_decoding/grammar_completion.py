"""Completes a row's JSON before the row reaches its token limit.

The schemas of a grammar say which texts would end the JSON where a row stands (see
schemas/json_reader.py); the shortest one that the matcher accepts is the row's ending. While far
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
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from mlx_server.engine.messages import Grammar
from mlx_server.schemas.instances import Instances
from mlx_server.schemas.json_reader import JsonReader
from mlx_server.worker.constrained_decoding.token_classes import Ids, Mask, TokenClasses
from mlx_server.worker.constrained_decoding.yielding_matcher import YieldingMatcher

MARGIN = 8
"""A row is restricted up to this many tokens before what its ending and a token may need."""
UNKNOWN = 64
"""The tokens that are left for the ending of a grammar before it is known."""
STEP_CALLS = 400
"""The calls of the matcher between two of a row's tokens, each of one or two microseconds."""
READ_CALLS = 25
"""What it costs to read a token and to propose endings after it, in such calls."""
TEXTS = 160
"""The most texts that are tried as an ending in one place."""
FEW = 4
"""Of a larger group of similar tokens three are tried for all."""
RESERVE = 4
"""The tokens by which others of a group may need more than those that were tried, and one character
more of a text that is still too short."""
LONGEST_ENDING = 256
"""The most tokens of an ending that takes the place of what a row repeats."""
READ_AHEAD, READ_AT_ONCE = 64, 256
"""A row's tokens are read so many tokens before the first search, and so many in a step."""
NARROW = 16
"""The members of an object from which on each call of the matcher costs more."""
MOST_SCHEMAS = 1000
"""The most schemas whose shortest instances are made at compile time."""

NEVER = 1 << 60

TAIL = 64
"""The most characters between the JSON and the end of the answer."""
TAILS = 8
"""The most times that these are searched for a grammar."""
CONTINUATIONS = (b"\x80", b"\xa0", b"\x90")
"""Bytes that continue a character which a token began; one of them always may."""


@dataclass(frozen=True)
class CompletionHints:
    """The results about a grammar's endings at compile time, shared by all of its rows."""

    schemas: tuple[Instances, ...]
    is_framed: bool
    """Whether there is text around the JSON."""
    growth: int
    """The number of tokens by which a single token may lengthen the shortest ending."""
    call: int
    """The cost of a call: with many members in an object the matcher reads hundreds of items."""
    tokens: list[int] | None = None
    """An ending from the grammar's start; None if none is known."""
    tails: list[list[int]] = field(default_factory=lambda: [[]])
    """What ends the answer after its JSON."""

    def next_search(self, remaining: int, ending: list[int] | None) -> int:
        """Returns how many tokens are left when an ending has to be known next. ending: the present
        one, None if it is not known."""
        need = UNKNOWN + self.growth if ending is None else len(ending)
        slack, reach = remaining - 1 - need, self.growth + MARGIN
        if slack <= reach:
            return remaining
        return remaining - max(1, (slack - reach) // (1 + self.growth))


def completion_hints(
    grammar: Grammar, classes: TokenClasses, matcher: YieldingMatcher, begun: Sequence[int] = ()
) -> CompletionHints:
    """matcher: in its initial state, where it stays. begun: the tokens that it has accepted
    already."""
    roots = {name: json.loads(schema) for name, schema in grammar.schemas}
    instances = (
        *map(Instances, roots.values()),
        *(Instances(roots[name], json.loads(frame)) for name, frame in grammar.frames),
    )
    is_framed = not grammar.is_schema
    growth = width = 0
    for one in instances:
        for schema in _inside(one.start):
            with suppress(*UNREADABLE):
                width = max(width, len(schema.get("properties", ())))
                if schema is not one.root:  # which no token of the row begins
                    growth = max(growth, len(classes.cut((one.text([schema]) or "").encode())))
    call = 1 if width <= NARROW else width // 5
    hints = CompletionHints(instances, is_framed, growth, call)
    reader = JsonReader(instances, is_framed=False)
    with suppress(*UNREADABLE):
        reader.read(b"".join(map(classes.text_of, begun)))
    ending = EndingSearch(hints, classes, matcher, 4 * STEP_CALLS * call).ending(reader)
    return CompletionHints(instances, is_framed, growth, call, ending, hints.tails)


UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a schema that says something unusual may raise: it has no endings then."""


def _inside(root: Any) -> list[dict[str, Any]]:
    """Returns the objects inside a schema, most of which are schemas."""
    found, waiting = list[dict[str, Any]](), [root]
    while waiting and len(found) < MOST_SCHEMAS:
        value = waiting.pop()
        if isinstance(value, dict):
            found.append(value)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found


class EndingSearch:
    """Searches endings from one state of a matcher, at a cost that is counted in its calls: so an
    answer does not depend on how busy the machine is."""

    def __init__(
        self, hints: CompletionHints, classes: TokenClasses, matcher: YieldingMatcher, calls: int
    ) -> None:
        self._hints, self._classes, self._matcher = hints, classes, matcher
        self._left = calls

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def fits(self, tokens: list[int]) -> bool:
        return self._fitting(tokens) == len(tokens)

    def _fitting(self, tokens: list[int]) -> int:
        """Returns how many of the tokens may come next, one after another."""
        if self.is_spent:
            return 0
        count = self._matcher.validate_tokens(tokens)
        self._left -= self._hints.call * (1 + count // 8)
        return count

    def ending(self, reader: JsonReader, begun: Sequence[int] = ()) -> list[int] | None:
        """Returns the shortest ending after the tokens `begun`, which the reader has read."""
        if not begun and self._matcher.is_accepting():
            return []
        stop, is_whole = self._classes.stop, False
        for tokens in self._proposals(reader, begun):
            whole = [*begun, *tokens]
            for tail in self._hints.tails:
                ending = [*tokens, *tail]
                count = self._fitting([*begun, *ending, stop])
                if count == len(begun) + len(ending) + 1:
                    return ending
                if count < len(whole):
                    break
            else:
                if not is_whole and reader.after(self._text(tokens)).is_ended:
                    is_whole = True
                    if (rest := self._new_tail(whole)) is not None:
                        return [*tokens, *rest]
        return None

    def _text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._classes.text_of(token) for token in tokens)

    def _proposals(self, reader: JsonReader, begun: Sequence[int]) -> Iterator[list[int]]:
        texts = set[str]()
        with suppress(*UNREADABLE):
            texts.update(reader.endings())
        self._left -= READ_CALLS + len(texts) // 4
        first = self._continuations(reader.missing_bytes)
        begins: dict[str, bool] = {}
        for text in sorted(texts, key=lambda text: (len(text), text))[:TEXTS]:
            if text[:1] not in begins:
                id = self._classes.ids.get(text[:1].encode()) if first == [[]] else None
                begins[text[:1]] = id is None or self.fits([*begun, id])
            tokens = self._classes.cut(text.encode()) if begins[text[:1]] else []
            if tokens or not text:
                yield from ([*before, *tokens] for before in first)
            if self.is_spent:
                return

    def _continuations(self, missing: int) -> list[list[int]]:
        """Returns tokens that complete a character which lacks so many bytes."""
        if not missing:
            return [[]]
        ids = self._classes.ids
        rest = [CONTINUATIONS[0]] * (missing - 1)
        texts = [[byte, *rest] for byte in CONTINUATIONS]
        return [[ids[byte] for byte in text] for text in texts if all(byte in ids for byte in text)]

    def _new_tail(self, tokens: list[int]) -> list[int] | None:
        """Returns what ends the answer after these tokens, and keeps it for other rows."""
        if len(self._hints.tails) > TAILS:
            return None
        tail = self.tail(tokens)
        self._hints.tails.append(tail or [])
        return tail

    def tail(self, tokens: list[int]) -> list[int] | None:
        """Searches what ends the answer after these tokens, where a grammar leaves little choice:
        brackets, control tokens and quotes come first, and white space last."""
        matcher, tail = self._matcher.deep_copy(), list[int]()
        matcher.consume_tokens(tokens)
        while not (accepts := matcher.is_accepting()) and len(tail) < TAIL:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = (id for id in self._classes.closing if mask[id >> 3] >> (id & 7) & 1)
            if matcher.is_error() or (token := next(allowed, None)) is None:
                return None
            tail.append(token)
            matcher.consume_token(token)
        joined = self._classes.joined(tail)
        tail = joined if self.fits([*tokens, *joined, self._classes.stop]) else tail
        return tail if accepts else None


class GrammarCompletion:
    """Restricts one row's tokens so that its JSON can be completed within the token limit."""

    def __init__(
        self, classes: TokenClasses, hints: CompletionHints, begun: Sequence[int] = ()
    ) -> None:
        """begun: the tokens that the grammar accepted before the row's own."""
        self._classes, self._hints = classes, hints
        self._reader = JsonReader(hints.schemas, is_framed=hints.is_framed)
        self._unread = list(begun)
        """The tokens that the reader has not read yet."""
        self._tokens = hints.tokens
        """The latest ending that was found; None if there was none."""
        self._fits = hints.tokens is not None
        """Whether that ending completes the grammar from the present state."""
        self._next = NEVER
        """The remaining tokens at which the next search is due."""
        self._endings: dict[int, list[int]] = {}
        """The endings that were found after some of the tokens that may come next."""
        self._probe: YieldingMatcher | None = None

    @property
    def ending(self) -> list[int] | None:
        """The ending that `allow` found last; None if there was none."""
        return self._tokens if self._fits else None

    def advance(self, token: int) -> None:
        """Follows the row's latest token."""
        self._unread.append(token)
        if self._fits and self._tokens and self._tokens[0] == token:
            self._tokens = self._tokens[1:]
        else:
            self._tokens = self._endings.get(token)
            self._fits = self._tokens is not None
        self._endings = {}

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
        if not self._hints.schemas:
            return
        if self._next == NEVER:
            self._next = self._hints.next_search(remaining, self.ending)
        if remaining > self._next:
            if remaining <= self._next + READ_AHEAD + len(self._unread) // READ_AT_ONCE:
                self._read(READ_AT_ONCE)
            return
        self._next = self._hints.next_search(remaining, self.ending)
        if self._next < remaining and self._fits:
            return
        self._read(len(self._unread))
        if self._hints.is_framed and (not self._reader.is_inside or matcher.is_accepting()):
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
        self._read(len(self._unread))
        search = self._found(matcher)
        if self._tokens is None:
            self._tokens = search.tail([])
            self._fits = self._tokens is not None
        ending = self._tokens
        if ending is None or len(ending) > LONGEST_ENDING:
            return False
        only = np.zeros_like(mask)
        _allow(only, ending[:1] or self._classes.stops)
        if not (mask & only).any():
            return False
        mask &= only
        return True

    def _found(self, matcher: YieldingMatcher) -> EndingSearch:
        """Finds an ending from the present state, unless the latest one fits."""
        self._probe = matcher.copy()
        search = EndingSearch(self._hints, self._classes, self._probe, STEP_CALLS)
        if not self._fits:
            self._tokens = search.ending(self._reader)
            self._fits = self._tokens is not None
        return search

    def _read(self, most: int) -> None:
        for token in self._unread[:most] if self._hints.schemas else ():
            if token in self._classes.apart:
                self._reader.pass_delimiter()
            else:
                with suppress(*UNREADABLE):
                    self._reader.read(self._classes.text_of(token))
        del self._unread[:most]

    def _restrict(self, mask: Mask, ending: list[int], room: int, search: EndingSearch) -> None:
        """room: the tokens that may come before or lengthen the ending after the next token."""
        classes, allowed = self._classes, mask.copy()
        mask[:] = 0
        _allow(mask, [*ending[:1], *(() if ending else classes.stops)])
        if room >= 0:
            _allow(mask, self._leading_to(ending, room + len(ending)))
            is_free = self._reader.reads_free_text
            is_too_short = is_free and not classes.text_of((*ending, 0)[0]).startswith(b'"')
            if room >= RESERVE * is_too_short:
                if is_free:
                    mask |= allowed & classes.plain[: len(mask)]
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
        groups = sorted(self._classes.by_kind.of(mask), key=lambda ids: ink[ids].min())
        changing = list[Ids]()
        for ids in groups:
            some = ids if len(ids) <= FEW else ids[[0, len(ids) // 2, -1]]
            if all(search.fits([token, *ending, stop]) for token in some.tolist()):
                yield ids
            else:
                changing.append(ids)
        for ids in changing:
            if search.is_spent:
                return
            some = ids if len(ids) <= FEW else ids[[0, len(ids) // 2, -1]]
            growths = [self._growth(token, ending, search) for token in some.tolist()]
            if len(ids) > FEW and max(growths) + RESERVE <= room:
                yield ids
            else:
                fitting = zip(some.tolist(), growths, strict=True)
                yield [token for token, growth in fitting if growth <= room]

    def _growth(self, token: int, ending: list[int], search: EndingSearch) -> float:
        """Returns by how many tokens this one lengthens the ending."""
        reader, found = self._reader, None
        with suppress(*UNREADABLE):
            found = search.ending(reader.after(self._classes.text_of(token)), [token])
        if found is None:
            return float("inf")
        self._endings[token] = found
        return len(found) - len(ending)


def _allow(mask: Mask, tokens: Iterable[int]) -> None:
    ids = tokens if isinstance(tokens, np.ndarray) else np.array([*tokens], dtype=np.intp)
    bits = np.uint32(1) << (ids & 31).astype(np.uint32)
    np.bitwise_or.at(mask.view(np.uint32), ids >> 5, bits)
