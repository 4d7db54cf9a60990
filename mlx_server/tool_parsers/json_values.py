"""JSON as models write it, value by value, while it is being written."""

import re
from functools import partial
from typing import Any

from mlx_server import limits
from mlx_server.repair.exact import exactly
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers.calls import Call
from mlx_server.tool_parsers.source import Into, Source, Steps

PLAIN = re.compile(r'[^"\\]+')
SCALAR = re.compile(r"[-+.\w]+")
HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")

ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def arguments(source: Source, call: Call) -> Steps[None]:
    """An object after its brace, every value as soon as it is certain. Finishes nothing."""
    if (yield from _end_of(source, "}")):
        return
    while True:
        name = yield from key(source)
        if (yield from source.peek()) == '"' and call.streams(name):
            source.take(1)
            yield from text(source, partial(call.text, name))
            call.end_text(name)
        else:
            call.value(name, (yield from value(source)))
        if (yield from _next_or_end(source, "}")):
            return


def key(source: Source) -> Steps[str]:
    """And its colon, and the white space around."""
    yield from source.space()
    yield from source.expect('"')
    found = yield from string(source)
    yield from source.space()
    yield from source.expect(":")
    yield from source.space()
    return found


def value(source: Source, depth: int = limits.CALL_DEPTH.value) -> Steps[Any]:
    """Any JSON value; white space before it is read."""
    yield from source.space()
    if not depth:
        raise Malformed("nested too deep")
    match (yield from source.accept("{", "[", '"')):
        case "{":
            return (yield from _object(source, depth - 1))
        case "[":
            return (yield from _array(source, depth - 1))
        case '"':
            return (yield from string(source))
    return (yield from _scalar(source))


def string(source: Source) -> Steps[str]:
    """After its opening quote."""
    pieces: list[str] = []
    yield from text(source, pieces.append)
    return "".join(pieces)


def text(source: Source, into: Into) -> Steps[None]:
    """A string after its opening quote, passed on as it comes. Line breaks in it are let pass."""
    source.quoted = True
    while True:
        yield from source.match(PLAIN, into)
        if not (yield from source.peek()):
            raise Malformed("a string has no end")
        if source.take(1) == '"':
            source.quoted = False
            return
        into((yield from escape(source)))


def escape(source: Source) -> Steps[str]:
    """After its backslash."""
    kind = yield from source.peek()
    source.take(1)
    if kind != "u":
        if kind not in ESCAPES:
            raise Malformed("an escape that JSON does not know")
        return ESCAPES[kind]
    unit = yield from hexadecimal(source, 4)
    if 0xD800 <= unit < 0xDC00 and (yield from source.accept("\\u")):
        low = yield from hexadecimal(source, 4)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))
        raise Malformed("half a surrogate pair")
    if 0xD800 <= unit < 0xE000:
        raise Malformed("half a surrogate pair")
    return chr(unit)


def hexadecimal(source: Source, size: int) -> Steps[int]:
    digits = ""
    while len(digits) < size and (yield from source.peek()):
        digits += source.take(1)
    if len(digits) < size or not HEXADECIMAL.fullmatch(digits):
        raise Malformed("an escape that JSON does not know")
    return int(digits, 16)


def _object(source: Source, depth: int) -> Steps[dict[str, Any]]:
    found: dict[str, Any] = {}
    if (yield from _end_of(source, "}")):
        return found
    while True:
        name = yield from key(source)
        found[name] = yield from value(source, depth)  # the last counts, as for all who read JSON
        if (yield from _next_or_end(source, "}")):
            return found


def _array(source: Source, depth: int) -> Steps[list[Any]]:
    found: list[Any] = []
    if (yield from _end_of(source, "]")):
        return found
    while True:
        found.append((yield from value(source, depth)))
        if (yield from _next_or_end(source, "]")):
            return found


def _end_of(source: Source, bracket: str) -> Steps[bool]:
    yield from source.space()
    return bool((yield from source.accept(bracket)))


def _next_or_end(source: Source, bracket: str) -> Steps[bool]:
    """After a value: whether the bracket closes; else there is another one."""
    yield from source.space()
    found = yield from source.expect(",", bracket)
    yield from source.space()
    return found == bracket


def _scalar(source: Source) -> Steps[Any]:
    pieces: list[str] = []
    yield from source.match(SCALAR, pieces.append)
    try:
        return exactly("".join(pieces), _no_constant)
    except ValueError:
        raise Malformed("no JSON value") from None


def _no_constant(name: str) -> None:
    raise ValueError(name)
