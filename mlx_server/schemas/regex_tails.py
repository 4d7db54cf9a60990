"""The shortest texts that complete a regular expression, from its beginning or from inside it.

Wherever a text stops within an expression, one of the tails completes it: those are the shortest
completions of the positions of the expression's automaton. Whether a tail fits is left to the
matcher that reads the text.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from mlx_server.schemas.patterns import PIECE

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


class RegexTails(NamedTuple):
    shortest: str
    tails: frozenset[str]
    """What may follow a text that stops within the expression; the empty text is one of them."""


class _Unreadable(ValueError):
    """The expression uses something that is not read here."""


@lru_cache(256)
def regex_tails(pattern: str) -> RegexTails | None:
    """Returns None for an expression that is not read here, such as one with `\\p{L}`."""
    pieces = PIECE.finditer(pattern)
    try:
        return _alternatives(pieces)
    except (_Unreadable, re.error, RecursionError):
        return None


def _alternatives(pieces: Iterator[re.Match[str]]) -> RegexTails:
    """Reads up to the end of the group."""
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
                raise _Unreadable
            sequence.append(_alternatives(pieces))
        elif piece["many"] or piece["times"]:
            if sequence:
                sequence.append(_repeated(sequence.pop(), piece))
        else:
            sequence.append(_single(piece))
    return _any([*options, _joined(sequence)])


def _single(piece: re.Match[str]) -> RegexTails:
    if piece["class"]:
        text = _member_of(piece["class"])
    elif piece["escape"]:
        escaped = piece["escape"]
        if escaped[1:].isalnum() and escaped not in _ESCAPES:
            raise _Unreadable
        text = _ESCAPES.get(escaped, escaped[1:])
    elif piece["other"] in ("^", "$"):
        text = ""
    else:
        text = "a" if piece["other"] == "." else piece["other"]
    return RegexTails(text, frozenset((text, "")))


@lru_cache(512)
def _member_of(written: str) -> str:
    class_ = re.compile(written.replace("[:", r"\[:"), re.ASCII)
    found = next((c for c in _SAMPLES if class_.fullmatch(c)), None)
    found = found or next((chr(n) for n in range(33, 0x3000) if class_.fullmatch(chr(n))), None)
    if not found:
        raise _Unreadable
    return found


def _repeated(one: RegexTails, piece: re.Match[str]) -> RegexTails:
    least = int(piece["least"] or 0) if piece["times"] else int(piece["many"] == "+")
    if len(one.shortest) * least > MOST_CHARACTERS:
        raise _Unreadable
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
            raise _Unreadable
    return RegexTails(rest, _some(tails))


def _any(options: list[RegexTails]) -> RegexTails:
    tails = (tail for option in options for tail in option.tails)
    shortest = min((option.shortest for option in options), key=len)
    return RegexTails(shortest, _some(tails) | {option.shortest for option in options})


def _some(tails: Iterable[str]) -> frozenset[str]:
    return frozenset(sorted(set(tails), key=lambda tail: (len(tail), tail))[:MOST_TAILS])
