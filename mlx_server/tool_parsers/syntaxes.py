"""The syntaxes in which models write arguments: JSON, Python, and Gemma's own."""

import json
import re
from functools import partial

from mlx_server.repair.coerce import read_as
from mlx_server.repair.exact import loads_exactly
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers.source import Into, Source, Steps
from mlx_server.tool_parsers.values import Syntax, no_constant

SCALAR = re.compile(r"[-+.\w]+")
HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
BARE = re.compile(r'[^{}\[\],"<>]+')
BARE_KEY = re.compile(r'[^:{}\[\],"<>]+')
PLAIN = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}

ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"} | {c: c for c in '"\\/'}
PYTHON_ESCAPES = {"'": "'", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
CODES = {"x": 2, "U": 8}
"""In Python, escapes by a number of so many digits."""

AFTER_STRING = ",)]}:"
"""What can follow a string where a value stands."""


def json_text(source: Source, quote: str, into: Into, *, python: bool = False) -> Steps[None]:
    """Line breaks in it are let pass.

    In Python, a quote that could not be followed by what follows is a part of the string: templates
    that show past calls to a model escape nothing.
    """
    source.quoted = True
    while True:
        yield from source.match(PLAIN[quote[0]], into)
        if (yield from source.accept(quote)):
            space = (yield from source.space()) if python else ""
            following = (yield from source.peek()) if python else ""
            if not following or following in AFTER_STRING:
                source.quoted = False
                return
            into(quote + space)
        elif (yield from source.accept("\\")):
            into((yield from _escape(source, python=python)))
        elif (yield from source.peek()):
            into(source.take(1))
        else:
            raise Malformed("a string has no end")


def marked_text(source: Source, quote: str, into: Into) -> Steps[None]:
    """Everything up to the same mark again."""
    if not (yield from source.up_to(quote, into=into)):
        raise Malformed("a string has no end")


def _escape(source: Source, *, python: bool) -> Steps[str]:
    """After its backslash."""
    kind = yield from source.peek()
    source.take(1)
    if kind == "u":
        return (yield from _utf16(source))
    if kind in ESCAPES:
        return ESCAPES[kind]
    if not python:
        raise Malformed("an escape that JSON does not know")
    if kind in CODES:
        code = yield from _code(source, CODES[kind])
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise Malformed("no character")
        return chr(code)
    return PYTHON_ESCAPES.get(kind, "\\" + kind)  # as Python reads those that it does not know


def _utf16(source: Source) -> Steps[str]:
    """A character after `\\u`, in one escape or, as a surrogate pair, in two."""
    unit = yield from _code(source, 4)
    if 0xD800 <= unit < 0xDC00 and (yield from source.accept("\\u")):
        low = yield from _code(source, 4)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))
        raise Malformed("half a surrogate pair")
    if 0xD800 <= unit < 0xE000:
        raise Malformed("half a surrogate pair")
    return chr(unit)


def _code(source: Source, size: int) -> Steps[int]:
    digits = ""
    while len(digits) < size and (yield from source.peek()):
        digits += source.take(1)
    if len(digits) < size or not HEXADECIMAL.fullmatch(digits):
        raise Malformed("an escape without its digits")
    return int(digits, 16)


def _json_scalar(word: str) -> str:
    loads_exactly(word, no_constant)
    return word


def _python_scalar(word: str) -> str:
    try:
        return _json_scalar(word)
    except ValueError:
        pass
    try:
        return json.dumps(int(word))
    except ValueError:
        return json.dumps(float(word))


def _bare_scalar(word: str) -> str:
    """What looks like no other value is text."""
    if not word:
        raise ValueError
    found = read_as(word, {}, "")
    return json.dumps(found) if isinstance(found, str) else word


JSON = Syntax({'"': json_text}, SCALAR, _json_scalar)

PYTHON = Syntax(
    dict.fromkeys(('"""', "'''", '"', "'"), partial(json_text, python=True)),
    SCALAR,
    _python_scalar,
    words={"True": "true", "False": "false", "None": "null"},
    brackets={"{": "}", "[": "]", "(": ")"},
    rules="python",
    opening="(",
    colon="=",
    key_quotes=(),
    bare_key=re.compile(r"\w+"),
    begins_with_key=True,
)


def gemma_syntax(quote: str) -> Syntax:
    """Strings stand as they are between two marks, and everything else is bare."""
    return Syntax(
        {quote: marked_text, '"': json_text},
        BARE,
        _bare_scalar,
        words={"True": "true", "False": "false", "None": "null"},
        rules="free",
        key_quotes=(quote, '"'),
        bare_key=BARE_KEY,
        untyped=True,
    )
