"""A strict JSON parser: refuses text that two parsers could read in two ways.

Half of a surrogate pair becomes U+FFFD: clients that cut a text within an emoji send the half again
with every turn.

Pure and synchronous. It raises BadRequest with code `invalid_json`; the message has the problem and
its place, and quotes at most 60 characters of the client's text.
"""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from mlx_server import limits
from mlx_server.errors import BadRequest
from mlx_server.json_bounds import ExceedsBounds, check_bounds, mask_escapes

QUOTED = 60

# Raw surrogates are not valid UTF-8, so a lone surrogate can only come from an escape.
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
LONE_SURROGATE = re.compile(rb"%s(?!%s)|(?<!%s)%s" % (_HIGH, _LOW, _HIGH, _LOW))
REPLACEMENT = rb"\ufffd"
LONE_SURROGATES = "lone_surrogates"
"""The member that `parse_request` adds."""

Pairs = list[tuple[str, Any]]

PIECE = 256 << 10
LONGEST_ESCAPE = len(r"\ud83d\ude42")


def parse(body: bytes) -> Any:
    """Parses one JSON text in UTF-8. What it accepts has the same value as with `json.loads`, with
    U+FFFD for halves of surrogate pairs."""
    whole = _without_lone_surrogates(body)
    return _parsed(whole, is_replaced=whole is not body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Like `parse`, for a body that must be an object."""
    return _an_object(parse(body))


def parse_request(body: bytes) -> dict[str, Any]:
    """Like `parse_object`, for the body of a request. If half of a surrogate pair was replaced, the
    object has one more member, which no wire type knows: it is reported as a field without
    effect."""
    whole = _without_lone_surrogates(body)
    is_replaced = whole is not body
    body_object = _an_object(_parsed(whole, is_replaced=is_replaced))
    return {**body_object, LONE_SURROGATES: True} if is_replaced else body_object


def _an_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid("the body is not a JSON object")
    return value


def _parsed(body: bytes, *, is_replaced: bool) -> Any:
    """is_replaced: whether keys may have become the same, since halves of pairs were replaced."""
    if not body or body.isspace():
        raise _invalid("the body is empty, but should be a JSON value")
    if body.startswith(codecs.BOM_UTF8):
        raise _invalid("the body starts with a byte order mark, but should be plain UTF-8")
    text = _decode(body)
    check_size(body)
    return _load(text, _with_replaced if is_replaced else _object)


def check_size(body: bytes) -> None:
    """Refuses JSON that `parse` would refuse for its size, without parsing it."""
    try:
        check_bounds(body)
    except ExceedsBounds as error:
        where = "" if error.offset is None else f" {_place(body, error.offset)}"
        raise _invalid(f"{error}{where}") from None


def quoted(text: str) -> str:
    """A client's text for use in a message: cut, printable and in backticks."""
    short = text if len(text) <= QUOTED else text[: QUOTED - 3] + "..."
    return "`" + "".join(char if char.isprintable() else "?" for char in short) + "`"


def _decode(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"not UTF-8 {_place(body, error.start)}") from None


def _lone_surrogates(body: bytes) -> Iterator[int]:
    """Searches in pieces: `re` holds the GIL during a search."""
    masked = mask_escapes(body)
    for start in range(0, len(masked), PIECE):
        end = start + PIECE
        for lone in LONE_SURROGATE.finditer(masked, start, end + LONGEST_ESCAPE):
            if lone.start() < end:
                yield lone.start()


def _without_lone_surrogates(body: bytes) -> bytes:
    """The body with U+FFFD for each, as an escape of the same length: all places stay the same."""
    if rb"\u" not in body:
        return body
    replaced: bytearray | None = None
    for at in _lone_surrogates(body):
        replaced = replaced or bytearray(body)
        replaced[at : at + len(REPLACEMENT)] = REPLACEMENT
    return bytes(replaced) if replaced else body


def _load(text: str, make: Callable[[Pairs], dict[str, Any]]) -> Any:
    try:
        return json.loads(
            text,
            object_pairs_hook=make,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except json.JSONDecodeError as error:
        what = error.msg.rstrip(": ").removesuffix(" at")
        raise _invalid(f"{what} at line {error.lineno}, column {error.colno}") from None


def _with_replaced(pairs: Pairs) -> dict[str, Any]:
    """Of keys that became the same the last one counts."""
    _object([pair for pair in pairs if "\ufffd" not in pair[0]])
    return dict(pairs)


def _object(pairs: Pairs) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise _invalid(f"the key {quoted(twice)} occurs twice in one object")
    return members


def _constant(literal: str) -> NoReturn:
    raise _invalid(f"{literal} is not JSON")


def _float(literal: str) -> float:
    number = float(literal)
    if math.isinf(number):
        raise _invalid(f"the number {quoted(literal)} is too large for a double")
    return number


def _int(literal: str) -> int:
    if len(literal) > limits.JSON_DIGITS and len(literal.removeprefix("-")) > limits.JSON_DIGITS:
        raise _invalid(f"a whole number has more than {limits.JSON_DIGITS} digits")
    return int(literal)


def _place(body: bytes, offset: int) -> str:
    start_of_line = body.rfind(b"\n", 0, offset) + 1
    line = body.count(b"\n", 0, offset) + 1
    column = len(body[start_of_line:offset].decode("utf-8", "replace")) + 1
    return f"at line {line}, column {column} (byte {offset})"


def _invalid(what: str) -> BadRequest:
    return BadRequest(f"Invalid JSON: {what}.", code="invalid_json")
