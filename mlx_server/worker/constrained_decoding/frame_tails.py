"""The shortest texts that complete a grammar's rules, from the beginning or from inside them.

The rules around an answer, such as the delimiters of a thought and of calls, are read once, when
the grammar is compiled. The texts are proposals, like those of regex_tails.py: one that the matcher
refuses is not used. A control token is written as a character of its own (`control`).
"""

import json
import re
from collections.abc import Sequence
from itertools import islice

from mlx_server.schemas.regex_tails import (
    NoShortestText,
    RegexTails,
    any_of,
    joined,
    regex_tails,
    repeated,
)

MOST_TAILS = 3_000
LONGEST = 40_000
"""The most characters of an ending: one schema's shortest instance may have half of them."""
MOST_RULES = 2_000
"""A grammar with more rules is not read."""
MOST_READ = 20_000
"""A grammar is not read of which more pieces would be read: a rule that calls itself is read again
wherever it stands."""

_CONTROL = 0xF0000
"""The first of the private characters that stand for control tokens."""
_CONTROLS = 0xFFFE

_RULE = re.compile(r"^(\w+)(?:\[[^\]\n]*\])?(?:\.-?\d+)?\s*:(?!:)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^%.*$", re.MULTILINE)
_PIECE = re.compile(
    r"\s+|//[^\n]*"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*")i?'
    r"|/(?P<regex>(?:[^/\\\n]|\\.)+)/[a-z]*"
    r"|<\[(?P<control>\d+)(?:[,-][\d,-]*)?\]>"
    r"|@(?P<json>\d+)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|\{(?P<least>\d+)(?:,\d*)?\}"
    r"|(?P<mark>[()\[\]|?*+&~])"
    r'|(?P<other>"(?:[^"\\\n]|\\.)*|/(?:[^/\\\n]|\\.)*|.)',
    re.DOTALL,
)


def frame_tails(
    rules: str, instances: Sequence[str | None], spelled: "Spelled"
) -> RegexTails | None:
    """Returns the tails of the rule `start`; None for a grammar that is not read here.

    rules: Lark, with `@0` for the first schema. instances: the shortest one of each schema.
    """
    places = [*islice(_RULE.finditer(rules), MOST_RULES + 1)]
    if not 0 < len(places) <= MOST_RULES:
        return None
    ends = [*(place.start() for place in places[1:]), len(rules)]
    bodies = {
        place[1]: _DIRECTIVE.sub("", rules[place.end() : end])
        for place, end in zip(places, ends, strict=True)
    }
    try:
        return _Rules(bodies, instances, spelled).of("start")
    except (NoShortestText, TooMuchToRead, RecursionError):
        return None


class TooMuchToRead(Exception):
    """Reading the rules would take too long."""


class Spelled:
    """Control tokens as characters."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def character(self, id: int) -> str:
        if id not in self._ids:
            self._ids.append(id)
        if len(self._ids) > _CONTROLS:
            raise NoShortestText
        return chr(_CONTROL + self._ids.index(id))

    def parts(self, text: str) -> list[str | int]:
        """Returns the text between control tokens, and their ids."""
        if not self._ids:
            return [text]
        last = chr(_CONTROL + len(self._ids) - 1)
        found = re.split(f"([{chr(_CONTROL)}-{last}])", text)
        return [self._ids[ord(p) - _CONTROL] if n % 2 else p for n, p in enumerate(found) if p]


def spelled_text(text: str) -> str:
    """Decodes a Lark string; returns "" where a client used an escape that JSON does not have."""
    try:
        found: str = json.loads(text)
        found.encode()
    except ValueError:
        return ""
    return found


class _Rules:
    def __init__(
        self, bodies: dict[str, str], instances: Sequence[str | None], spelled: Spelled
    ) -> None:
        self._bodies = bodies
        self._instances = instances
        self._spelled = spelled
        self._known: dict[str, RegexTails] = {}
        self._open: set[str] = set()
        self._read = 0

    def of(self, name: str) -> RegexTails:
        if name in self._open or name not in self._bodies:  # recursion has no end
            raise NoShortestText
        if name not in self._known:
            self._open.add(name)
            try:
                self._known[name] = _Body(self._bodies[name], self).read()
            finally:
                self._open.remove(name)
        return self._known[name]

    def leaf(self, piece: re.Match[str]) -> RegexTails:
        self._read += 1
        if self._read > MOST_READ:
            raise TooMuchToRead
        if piece["name"]:
            return self.of(piece["name"])
        if piece["regex"]:
            found = regex_tails(piece["regex"].replace(r"\/", "/"))
        elif piece["json"]:
            text = self._instances[int(piece["json"])]
            found = None if text is None else RegexTails(text, frozenset((text, "")))
        elif piece["control"]:
            text = self._spelled.character(int(piece["control"]))
            found = RegexTails(text, frozenset((text, "")))
        else:
            text = spelled_text(piece["text"] or "")
            found = RegexTails(text, frozenset(text[at:] for at in range(len(text) + 1)))
        if found is None:
            raise NoShortestText
        return found


class _Body:
    """Reads the body of a rule. An option that can't be read is left out."""

    def __init__(self, body: str, rules: _Rules) -> None:
        pieces = _PIECE.finditer(body)
        self._pieces = [piece for piece in pieces if piece.lastgroup]
        self._at = 0
        self._rules = rules

    def read(self) -> RegexTails:
        found = self._options()
        if self._at < len(self._pieces):
            raise NoShortestText
        return found

    def _options(self) -> RegexTails:
        options = [self._both()]
        while self._mark("|"):
            options.append(self._both())
        if readable := [option for option in options if option]:
            return any_of(readable, MOST_TAILS)
        raise NoShortestText

    def _both(self) -> RegexTails | None:
        """Returns the longest text of expressions that must all match, which is the likeliest to
        match all."""
        parts = [self._sequence()]
        while self._mark("&"):
            parts.append(self._sequence())
        found = [part for part in parts if part]
        if len(found) < len(parts):
            return None
        longest = max(found, key=lambda part: len(part.shortest))
        tails = frozenset().union(*(part.tails for part in found))
        return RegexTails(longest.shortest, tails) if found[1:] else longest

    def _sequence(self) -> RegexTails | None:
        sequence: list[RegexTails | None] = []
        while (piece := self._peek()) and piece["mark"] not in ("|", ")", "]", "&"):
            sequence.append(self._factor(piece))
        found = [one for one in sequence if one]
        return joined(found, MOST_TAILS, LONGEST) if len(found) == len(sequence) else None

    def _factor(self, piece: re.Match[str]) -> RegexTails | None:
        self._at += 1
        found: RegexTails | None
        if piece["mark"] == "~":  # an expression like `~"a"` matches the empty text
            following = self._peek()
            if following is None:
                raise NoShortestText
            self._factor(following)
            return RegexTails("", frozenset(("",)))
        if piece["mark"] in ("(", "["):
            found = self._group(optional=piece["mark"] == "[")
        elif piece["mark"] or piece["other"] or piece["least"]:
            raise NoShortestText
        else:
            found = self._leaf(piece)
        return self._times(found)

    def _group(self, *, optional: bool) -> RegexTails | None:
        try:
            found = self._options()
        except NoShortestText:
            found = None
        if not self._mark("]" if optional else ")"):
            raise NoShortestText
        return repeated(found, 0, MOST_TAILS) if optional and found else found

    def _leaf(self, piece: re.Match[str]) -> RegexTails | None:
        try:
            return self._rules.leaf(piece)
        except NoShortestText:
            return None

    def _times(self, found: RegexTails | None) -> RegexTails | None:
        while (piece := self._peek()) and (piece["mark"] in ("?", "*", "+") or piece["least"]):
            self._at += 1
            least = int(piece["least"] or piece["mark"] == "+")
            if found:
                found = repeated(found, least, MOST_TAILS)
            elif not least:
                found = RegexTails("", frozenset(("",)))
        return found

    def _peek(self) -> re.Match[str] | None:
        return self._pieces[self._at] if self._at < len(self._pieces) else None

    def _mark(self, mark: str) -> bool:
        piece = self._peek()
        found = piece is not None and piece["mark"] == mark
        self._at += found
        return found
