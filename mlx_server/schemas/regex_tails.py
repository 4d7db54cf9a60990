"""The shortest texts that complete a regular expression, from its beginning or from inside it.

Wherever a text stops within an expression, one of the tails completes it: the tails are the
shortest completions from the positions of the expression's automaton. The matcher that reads the
text decides whether a tail fits.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from mlx_server.schemas.patterns import PIECE, without_nested_classes

MOST_TAILS = 400
MOST_CHARACTERS = 2_000
"""An expression whose shortest text is longer is not read."""
MOST_REPEATS = 128
"""Repetitions after which a tail may begin, counted from the last one."""

_SAMPLES = "a0A-_. /:@b1B+,~!#%&'()*;<=>?[]^`{|}$\"\\é中"
"""The characters that stand for a class, the preferred ones first."""
_ESCAPES = {
    r"\d": "0",
    r"\D": "a",
    r"\w": "a",
    r"\W": "-",
    r"\s": " ",
    r"\S": "a",
    r"\n": "\n",
    r"\r": "\r",
    r"\t": "\t",
    r"\f": "\f",
    r"\v": "\v",
    r"\a": "\a",
    r"\A": "",
    r"\z": "",
    r"\Z": "",
}


_CODED = re.compile(r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\.", re.DOTALL)

_ITEM = re.compile(r"(\\.|[^\\])(?:-(\\.|[^\\]))?", re.DOTALL)
"""A range in a character class, or a single item of one."""
_OPERATORS = frozenset("[]&~|-^")
"""The characters that may stand for themselves in a class. Python warns where a later one may read
it as a set of sets, so that it is escaped."""


class RegexTails(NamedTuple):
    shortest: str
    tails: frozenset[str]
    """The texts that may follow a text that stops within the expression; the empty text is one of
    them."""


class NoShortestText(ValueError):
    """An expression uses a construct that is not read here."""


@lru_cache(256)
def regex_tails(pattern: str) -> RegexTails | None:
    """Returns None for an expression that is not read here, such as one with `\\p{L}`. The
    expression may be written as a grammar has it, in Rust's spelling."""
    pieces = PIECE.finditer(_CODED.sub(_decoded, without_nested_classes(pattern)))
    try:
        return _alternatives(pieces)
    except (NoShortestText, re.error, RecursionError):
        return None


def _decoded(code: re.Match[str]) -> str:
    digits = code["x"] or code["u"]
    return re.escape(chr(int(digits, 16))) if digits else code[0]


def _alternatives(pieces: Iterator[re.Match[str]]) -> RegexTails:
    """Reads the alternatives up to the end of the group."""
    options: list[RegexTails] = []
    sequence: list[RegexTails] = []
    for piece in pieces:
        if piece["close"]:
            break
        if piece["other"] == "|":
            options.append(_joined(sequence))
            sequence = []
        elif piece["open"]:
            if piece["open"].startswith(("(?=", "(?!", "(?<=", "(?<!")):
                raise NoShortestText
            sequence.append(_alternatives(pieces))
        elif piece["many"] or piece["times"]:
            if sequence:
                least = int(piece["least"] or 0) if piece["times"] else int(piece["many"] == "+")
                sequence.append(_repeated(sequence.pop(), least))
        else:
            sequence.append(_single(piece))
    return _any_of([*options, _joined(sequence)])


def _single(piece: re.Match[str]) -> RegexTails:
    if piece["class"]:
        text = _member_of(piece["class"])
    elif piece["escape"]:
        escaped = piece["escape"]
        if escaped[1:].isalnum() and escaped not in _ESCAPES:
            raise NoShortestText
        text = _ESCAPES.get(escaped, escaped[1:])
    elif piece["other"] in ("^", "$"):
        text = ""
    else:
        text = "a" if piece["other"] == "." else piece["other"]
    return RegexTails(text, frozenset((text, "")))


@lru_cache(512)
def _member_of(written: str) -> str:
    opening = "[^" if written.startswith("[^") else "["
    class_ = re.compile(opening + _ITEM.sub(_escaped, written[len(opening) : -1]) + "]", re.ASCII)
    found = next((c for c in _SAMPLES if class_.fullmatch(c)), None)
    found = found or next((chr(n) for n in range(33, 0x3000) if class_.fullmatch(chr(n))), None)
    if not found:
        raise NoShortestText
    return found


def _escaped(item: re.Match[str]) -> str:
    return "-".join(f"\\{end}" if end in _OPERATORS else end for end in item.groups() if end)


def _repeated(one: RegexTails, least: int) -> RegexTails:
    if len(one.shortest) * least > MOST_CHARACTERS:
        raise NoShortestText
    times = min(max(least, 1), MOST_REPEATS, 1 + 10 * MOST_TAILS // len(one.tails))
    after = [one.shortest * n for n in range(times)]
    tails = _some(tail + rest for rest in after for tail in one.tails)
    whole = one.shortest * least
    return RegexTails(whole, tails | {whole})


def _joined(sequence: list[RegexTails]) -> RegexTails:
    rest, tails = "", frozenset(("",))
    for one in reversed(sequence):
        if len(tails) < MOST_TAILS:
            tails |= {tail + rest for tail in one.tails}
        rest = one.shortest + rest
        if len(rest) > MOST_CHARACTERS:
            raise NoShortestText
    return RegexTails(rest, _some(tails))


def _any_of(options: list[RegexTails]) -> RegexTails:
    tails = (tail for option in options for tail in option.tails)
    shortest = min((option.shortest for option in options), key=len)
    return RegexTails(shortest, _some(tails) | {option.shortest for option in options})


def _some(tails: Iterable[str]) -> frozenset[str]:
    return frozenset(sorted(set(tails), key=lambda tail: (len(tail), tail))[:MOST_TAILS])
