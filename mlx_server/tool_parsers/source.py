"""The text of a model, read while it is being written.

Parsers are generators over a `Source`: they look at the text that has come, and yield where they
need more of it to decide. So they read like recursive descent, and how the text is cut can't change
what they find.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from mlx_server.tool_parsers.model_json import Malformed

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields whenever it has to wait for more text; returns T."""

Into = Callable[[str], None]

SPACE = re.compile(r"\s+")

CACHED = 128
"""The sets of delimiters of which each cache has the patterns."""

MOST_STOPS = 8
"""The most stop tokens in a row that are dropped where they are spelled out at the end of an
answer: text that may be one is held back, and searched again with each piece."""


class Source:
    """The unread text, and where in it a delimiter was written as one token.

    delimiters: the control tokens of the vocabulary. A delimiter that is one of them or contains
    one is found only where the model wrote those tokens. One that the vocabulary lacks is found
    wherever it is spelled, but never as a part of a control token.
    """

    def __init__(
        self, delimiters: frozenset[str] = frozenset(), stops: tuple[str, ...] = ()
    ) -> None:
        """stops: stop tokens that the vocabulary lacks, so that an answer may end in their text."""
        self._single = delimiters
        self._stops = _stops_at_end(stops) if stops else None
        self._held = ""
        """The end of the text that has come, which may spell a stop token."""
        self._control = _any_of(tuple(sorted(delimiters)))
        self._tokens: dict[str, list[tuple[int, str]]] = {}
        """The control tokens in each delimiter, with their offsets."""
        self._text = ""
        self._at = 0
        """The position in `_text` of the first unread character."""
        self._before = 0
        """The number of characters before `_text`."""
        self._places: dict[int, str] = {}
        self._kept: list[str] | None = None
        self.quoted = False
        """Whether the parser is inside a string, where a control token is only the text that it
        spells."""
        self.closed = False
        self.cut = False
        """Whether the answer was cut off, rather than ended by the model."""

    def feed(self, text: str) -> None:
        if self._stops:
            text = self._held + text
            runs = self._stops.finditer(text)
            certain = next((run.start() for run in runs if run.end() == len(text)), len(text))
            text, self._held = text[:certain], text[certain:]
        self._append(text)

    def _append(self, text: str) -> None:
        if self._at:
            self._before += self._at
            self._text, self._at = self._text[self._at :], 0
            if self._places:
                unread = {p: m for p, m in self._places.items() if p + len(m) > self._before}
                self._places = unread
        self._text += text

    def feed_delimiter(self, delimiter: str) -> None:
        """Adds a token that is this delimiter."""
        self._release()
        self._places[self._before + len(self._text)] = delimiter
        self._append(delimiter)

    def _release(self) -> None:
        held, self._held = self._held, ""
        self._append(held)

    def close(self, *, cut: bool) -> None:
        match = self._stops.fullmatch(self._held) if self._stops else None
        if cut or not (match and match["whole"] == self._held):
            self._release()
        self.closed, self.cut = True, cut

    @property
    def ended(self) -> bool:
        return self.closed and self._at == len(self._text)

    @property
    def position(self) -> int:
        """The number of characters that have been read."""
        return self._before + self._at

    def ahead(self, skipped: int = 0) -> str:
        """Returns the unread text that has come, without its first characters."""
        return self._text[self._at + skipped :]

    @property
    def unread(self) -> str:
        """All that has come and was not read, even what may spell a stop token."""
        return self.ahead() + self._held

    def take(self, size: int) -> str:
        text = self._text[self._at : self._at + size]
        self._at += len(text)
        if self._kept is not None:
            self._kept.append(text)
        return text

    def keep(self, already: str = "") -> None:
        """Remembers what is read from now on, in case it turns out to be text."""
        self._kept = [already]

    def kept(self) -> str:
        """Returns what was read since `keep`, and ends it."""
        pieces, self._kept = self._kept or [], None
        return "".join(pieces)

    def peek(self) -> Steps[str]:
        """Returns the next character; empty at the end."""
        return (yield from self.at(0))

    def space(self) -> Steps[str]:
        """Reads white space."""
        return (yield from self.run(SPACE))

    def stopped(self) -> Steps[bool]:
        """Whether the model has ended its answer here, but for white space."""
        yield from self.after_space()
        return self.closed and not self.cut and not self._text[self._at :].strip()

    def comes(self, *literals: str) -> Steps[bool]:
        """Whether one of these comes next, which stays to be read."""
        return bool((yield from self.one_of(literals)))

    def after_space(self, *literals: str) -> Steps[str]:
        """Returns which of these comes next after white space; all of it stays to be read."""
        skipped = 0
        while True:
            if space := SPACE.match(self._text, self._at + skipped):
                skipped += len(space[0])
            at = self._at + skipped
            literal = self._decided(literals, at) if self.closed or at < len(self._text) else None
            if literal is not None:
                return literal
            yield

    def until(self, size: int) -> Steps[None]:
        """Waits until so many characters are unread, or no more will come."""
        while len(self.ahead()) < size and not self.closed:
            yield

    def accept(self, *literals: str) -> Steps[str]:
        """Reads the longest of these that comes next; empty if none does.

        If the end of the answer cuts one off, the part of it is read as well.
        """
        literal = yield from self.one_of(literals)
        if not literal and self.cut and self._longer_may_come(self._at, "", literals):
            self.take(len(self._text))
            return ""
        return self.take(len(literal))

    def expect(self, *literals: str) -> Steps[str]:
        literal = yield from self.accept(*literals)
        if not literal:
            raise Malformed(f"expected one of {literals}")
        return literal

    def accept_spaced(self, *literals: str) -> Steps[str]:
        """Reads white space, and then as `accept` does."""
        yield from self.space()
        return (yield from self.accept(*literals))

    def expect_spaced(self, *literals: str) -> Steps[str]:
        yield from self.space()
        return (yield from self.expect(*literals))

    def lookahead(self, skipped: int = 0) -> "Lookahead":
        return Lookahead(self, skipped)

    def fence(self) -> Steps[None]:
        """Reads the beginning of a block of code in Markdown, if one comes."""
        if (yield from self.accept("```")):
            yield from self.accept("json")

    def up_to(self, *delimiters: str, into: Into) -> Steps[str]:
        """Passes text on until a delimiter comes, which is read and returned; empty at the end."""
        may_begin = _may_begin(delimiters).search
        while True:
            first = may_begin(self._text, self._at)
            if first is None and not self.closed:  # as in nearly all pieces
                if self._at < len(self._text):
                    into(self.take(len(self._text)))
                yield
                continue
            start = first.start() if first else len(self._text)
            # a longer text that may become a delimiter goes before one that begins inside it
            undecided = self._undecided(delimiters, start)
            at, delimiter = start, ""
            if self.closed or start < undecided:
                at, delimiter = self._first(delimiters, start)
            torn = self.closed and self._before + undecided <= max(self._places, default=-1)
            if self.closed and not torn:
                undecided = len(self._text) + 1
            certain = min(at, undecided)
            if certain > self._at:
                into(self.take(certain - self._at))
            if torn and undecided <= at:  # an incomplete control token is no text
                self.take(len(self._text))
                return ""
            if self.closed or (delimiter and at < undecided):
                return self.take(len(delimiter))
            yield

    def text_up_to(self, *delimiters: str) -> Steps[tuple[str, str]]:
        """Reads and returns a text, and the delimiter after it; that is empty at the end."""
        pieces: list[str] = []
        delimiter = yield from self.up_to(*delimiters, into=pieces.append)
        return "".join(pieces), delimiter

    def match(self, pattern: re.Pattern[str], into: Into) -> Steps[None]:
        """Passes on the run of single characters that `pattern` (`[...]+`) matches."""
        while (yield from self.peek()) and (match := pattern.match(self._text, self._at)):
            into(self.take(len(match[0])))

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads and returns the same run."""
        pieces: list[str] = []
        yield from self.match(pattern, pieces.append)
        return "".join(pieces)

    def at(self, offset: int) -> Steps[str]:
        """Returns the character at this distance from the next one; empty after the end."""
        while self._at + offset >= len(self._text) and not self.closed:
            yield
        return self._text[self._at + offset : self._at + offset + 1]

    def next_of(self, delimiters: tuple[str, ...], offset: int) -> tuple[int, str]:
        """Returns the distance of the next of these delimiters, and which it is; empty where the
        end of what has come may turn out to begin one, and at the end."""
        at, delimiter = self._first(delimiters, self._at + offset)
        undecided = self._undecided(delimiters, self._at + offset)
        certain = self.closed or at < undecided
        return (at - self._at, delimiter) if certain else (undecided - self._at, "")

    def one_of(self, literals: tuple[str, ...], offset: int = 0) -> Steps[str]:
        """Returns the longest of these that comes at this distance; empty if none does."""
        while (literal := self._decided(literals, self._at + offset)) is None:
            yield
        return literal

    def _decided(self, literals: tuple[str, ...], at: int) -> str | None:
        """Returns the longest of these that has come; None as long as a longer one may."""
        literal = max((x for x in literals if self._begins(x, at)), key=len, default="")
        decided = self.closed or not self._longer_may_come(at, literal, literals)
        return literal if decided else None

    def _first(self, delimiters: tuple[str, ...], start: int | None = None) -> tuple[int, str]:
        """Returns where the first delimiter begins, the longest if several do; the end if none."""
        for match in _any_of(delimiters).finditer(self._text, self._at if start is None else start):
            at = match.start()
            if mark := max((m for m in delimiters if self._begins(m, at)), key=len, default=""):
                return at, mark
        return len(self._text), ""

    def _begins(self, delimiter: str, at: int) -> bool:
        return self._text.startswith(delimiter, at) and self._is_written(delimiter, at)

    def _could_begin(self, delimiter: str, at: int) -> bool:
        """Whether the text that has come from `at` on is an unfinished delimiter."""
        return (
            len(self._text) - at < len(delimiter)
            and delimiter.startswith(self._text[at:])
            and self._is_written(delimiter, at)
        )

    def _is_written(self, delimiter: str, at: int) -> bool:
        """Whether the control tokens of a delimiter, as far as it has come, were written as tokens,
        and no others begin or end inside of it."""
        if not self._single:
            return True
        if delimiter not in self._tokens:
            matches = self._control.finditer(delimiter)
            self._tokens[delimiter] = [(match.start(), match[1]) for match in matches]
        end = min(len(delimiter), len(self._text) - at)
        if not self._places:
            return not any(offset < end for offset, _ in self._tokens[delimiter])
        place = self._before + at
        own = [(place + offset, token) for offset, token in self._tokens[delimiter] if offset < end]
        inside = [
            (p, token)
            for p, token in self._places.items()
            if p < place + end and place < p + len(token)
        ]
        return own == inside

    def _longer_may_come(self, at: int, literal: str, delimiters: tuple[str, ...]) -> bool:
        return any(
            len(delimiter) > len(literal) and self._could_begin(delimiter, at)
            for delimiter in delimiters
        )

    def _undecided(self, delimiters: tuple[str, ...], start: int | None = None) -> int:
        """Returns where the end of the text begins that may turn out to begin a delimiter."""
        first, longest, joined = _beginnings(delimiters)
        start = max(self._at if start is None else start, len(self._text) - longest + 1)
        for match in first.finditer(self._text, start):
            begun = "\0" + self._text[match.start() :]
            place = joined.find(begun)
            while place >= 0:
                end = joined.index("\0", place + 1)
                if self._could_begin(joined[place + 1 : end], match.start()):
                    return match.start()
                place = joined.find(begun, end)
        return len(self._text)


class Lookahead:
    """Looks at what comes next in a source, without reading it."""

    def __init__(self, source: Source, skipped: int = 0) -> None:
        self._source = source
        self._offset = skipped

    def peek(self) -> Steps[str]:
        """Returns the next character; empty at the end."""
        return (yield from self._source.at(self._offset))

    def accept(self, *literals: str) -> Steps[str]:
        """Skips the longest of these that comes next, and returns it; empty if none does."""
        literal = yield from self._source.one_of(literals, self._offset)
        self._offset += len(literal)
        return literal

    def find(self, *delimiters: str) -> Steps[str]:
        """Skips everything up to the next of these delimiters, which is returned; empty at the
        end."""
        while True:
            self._offset, delimiter = self._source.next_of(delimiters, self._offset)
            if delimiter or self._source.closed:
                return delimiter
            yield

    def up_to(self, *delimiters: str) -> Steps[str]:
        """Skips everything up to a delimiter and the delimiter, which is returned; empty at the
        end."""
        delimiter = yield from self.find(*delimiters)
        self._offset += len(delimiter)
        return delimiter

    def text_up_to(self, *delimiters: str) -> Steps[str]:
        """Skips everything up to a delimiter, which stays, and returns what was skipped."""
        begun = self._offset
        yield from self.find(*delimiters)
        return self._source.ahead(begun)[: self._offset - begun]

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Skips the run of single characters that `pattern` matches, and returns it."""
        text = ""
        while (character := (yield from self.peek())) and pattern.match(character):
            text += character
            self._offset += 1
        return text

    def space(self) -> Steps[str]:
        return (yield from self.run(SPACE))

    def accept_spaced(self, *literals: str) -> Steps[str]:
        yield from self.space()
        return (yield from self.accept(*literals))


def discard(piece: str) -> None:
    """Ignores a piece of text."""


def complete_source(text: str) -> Source:
    """Returns a source of the whole text: nothing more comes."""
    source = Source()
    source.feed(text)
    source.close(cut=False)
    return source


@lru_cache(maxsize=CACHED)
def _stops_at_end(stops: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern of stop tokens in a row at the text's end, the last of which may be
    incomplete. No place within a run is tried again, so that the time is in proportion to the
    text: what a lookahead has found is not given back. (A possessive quantifier says so too, but
    matches too little before Python 3.11.5.)"""
    begun = sorted({s[:size] for s in stops for size in range(1, len(s))}, key=len, reverse=True)
    longest_first = sorted(stops, key=len, reverse=True)
    whole, part = ("|".join(map(re.escape, each)) for each in (longest_first, begun))
    return re.compile(
        rf"(?=(?P<whole>(?:(?:{whole})\s*){{1,{MOST_STOPS}}}))(?P=whole)(?:(?:{part})\Z)?"
        rf"|(?:{part})\Z"
    )


@lru_cache(maxsize=CACHED)
def _any_of(delimiters: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that finds where any of these is spelled, overlapping ones too; its group 1
    is the longest.

    Matches are empty, so that the next one may begin inside this one.
    """
    longest_first = sorted(delimiters, key=len, reverse=True)
    return re.compile(f"(?=({'|'.join(map(re.escape, longest_first)) or '(?!)'}))")


@lru_cache(maxsize=CACHED)
def _may_begin(delimiters: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern of what a text contains wherever one of these may begin: two characters, or
    one at its end. It has no lookahead, so that a text without them is searched quickly."""
    begun = sorted({re.escape(delimiter[:2]) for delimiter in delimiters})
    at_end = sorted({rf"{re.escape(delimiter[0])}\Z" for delimiter in delimiters})
    return re.compile("|".join((*begun, *at_end)) or "(?!)")


@lru_cache(maxsize=CACHED)
def _beginnings(delimiters: tuple[str, ...]) -> tuple[re.Pattern[str], int, str]:
    """Returns a pattern of their first characters, the length of the longest, and all of them, each
    between two zeros."""
    first = _any_of(tuple(sorted({delimiter[0] for delimiter in delimiters})))
    joined = "\0".join(("", *delimiters, ""))
    return first, max(map(len, delimiters), default=1), joined
