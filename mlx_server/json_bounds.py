"""Bounds the values of a JSON text before it is parsed, since a parser holds the interpreter."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from mlx_server import limits

OPENING, CLOSING, QUOTE = b"[{", b"]}", b'"'
NO_BRACKETS = bytes(set(range(256)) - set(OPENING + CLOSING))
ZEROS = bytes.maketrans(b"123456789", b"000000000")
TOO_MANY_ZEROS = b"0" * (limits.JSON_DIGITS + 1)
MOST_VALUES = limits.JSON_STRINGS


def json_or_none(text: str | bytes) -> Any:
    """The value; None if the text is not JSON that can be read, and for null."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class ExceedsBounds(ValueError):
    def __init__(self, what: str, offset: int | None = None) -> None:
        super().__init__(what)
        self.offset = offset
        """The byte of the text at which the bound is passed, if it is known."""


def check_bounds(body: bytes, max_depth: int = limits.JSON_DEPTH) -> None:
    """Raises ExceedsBounds for a text that is nested too deeply, or has too many values."""
    masked = mask_escapes(body)
    if masked.count(QUOTE) > 2 * limits.JSON_STRINGS:
        most = limits.JSON_STRINGS
        raise ExceedsBounds(f"it has more than {most} strings, keys included")
    _check_nodes(masked, max_depth)


def check_numbers(body: bytes) -> None:
    """Raises ExceedsBounds for a text with a long number, or with more values than a text may have
    strings. It is for parsers that have no hook for numbers."""
    if body.count(b",") <= MOST_VALUES and TOO_MANY_ZEROS not in _zeros(body):
        return  # as nearly all texts are
    masked, commas = mask_escapes(body), 0
    for begin, end in _outside_strings(masked):
        commas += masked.count(b",", begin, end)
        if commas > MOST_VALUES or TOO_MANY_ZEROS in _zeros(masked[begin:end]):
            raise ExceedsBounds("it has too many or too long numbers")


def _zeros(text: bytes) -> bytes:
    """The text with a zero in place of each digit."""
    return text.translate(ZEROS)


def mask_escapes(body: bytes) -> bytes:
    """A copy of the same length without escapes, so that every quote begins or ends a string."""
    return body.replace(rb"\\", b"  ").replace(rb"\"", b"  ")


def _check_nodes(masked: bytes, max_depth: int) -> None:
    """Checks depth and number of nodes before a parser recurses. In invalid JSON the counts are
    exact up to the first error, where a parser stops."""
    if sum(masked.count(bracket) for bracket in OPENING) <= max_depth:
        return
    level = nodes = 0
    for begin, end in _outside_strings(masked):
        for bracket in masked[begin:end].translate(None, NO_BRACKETS):
            if bracket in CLOSING:
                level -= 1
                if level < 0:  # an error, so that the parser stops here
                    return
                continue
            level, nodes = level + 1, nodes + 1
            if level > max_depth:
                raise ExceedsBounds(
                    f"nested deeper than {max_depth} levels", _nth_opening(masked, nodes)
                )
            if nodes > limits.JSON_NODES:
                most = limits.JSON_NODES
                raise ExceedsBounds(f"it has more than {most} lists and objects")


def _outside_strings(masked: bytes) -> Iterator[tuple[int, int]]:
    begin, size = 0, len(masked)
    while begin < size:
        quote = masked.find(QUOTE, begin)
        end = size if quote < 0 else quote
        yield begin, end
        quote = masked.find(QUOTE, end + 1)
        begin = size if quote < 0 else quote + 1


def _nth_opening(masked: bytes, n: int) -> int:
    found = (
        at
        for begin, end in _outside_strings(masked)
        for at in range(begin, end)
        if masked[at] in OPENING
    )
    return next(islice(found, n - 1, None))
