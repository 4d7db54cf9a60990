"""The syntaxes in which models write arguments: JSON, Python, and Gemma's own."""

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial

from mlx_server.repair.coerce import read_as
from mlx_server.repair.model_json import Malformed, loads_exactly
from mlx_server.tool_parsers import python_strings
from mlx_server.tool_parsers.call_writer import ToolCallWriter
from mlx_server.tool_parsers.source import Into, Source, Steps
from mlx_server.tool_parsers.values import Syntax, no_constant

Escape = Callable[[Source], Steps[str]]

SCALAR = re.compile(r"[-+.\w]+")
HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
BARE = {"{": re.compile(r'[^{}\[\],"<>]+'), "(": re.compile(r'[^{}\[\](),"<>]+')}
"""Matches a bare scalar, by the bracket in front of the arguments."""
BARE_KEY = re.compile(r"""[^:={}\[\](),"'<>]+""")
PLAIN = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}

ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"} | {c: c for c in '"\\/'}
PYTHON_ESCAPES = {"'": "'", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
CODES = {"x": 2, "U": 8}
"""The number of digits in Python's escapes by number."""
KNOWN_ESCAPES = {"u", "N", *ESCAPES, *PYTHON_ESCAPES, *CODES}


def json_text(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None = None
) -> Steps[None]:
    """Reads a string of JSON. Line breaks in it are accepted."""
    yield from _escaped_text(source, quote, into, _json_escape)


def _escaped_text(source: Source, quote: str, into: Into, escape: Escape) -> Steps[None]:
    source.quoted = True
    while not (yield from _piece(source, quote, into, escape)):
        pass
    source.quoted = False


def python_text(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None, *, ends: tuple[str, ...]
) -> Steps[None]:
    """Reads a string of Python. A quote that can't end the string where it stands is part of it:
    templates that show past calls to a model escape nothing."""
    source.quoted = True
    inner = python_strings.InnerQuotes(quote)

    def read(piece: str) -> None:
        inner.after(piece)
        into(piece)

    while True:
        if (yield from _piece(source, quote, read, escape=_python_escape)):
            if (yield from inner.is_end(source, call, ends)):
                break
            read(quote)
    source.quoted = False


def _quoted_text(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None = None, *, delimiter: str
) -> Steps[None]:
    """Reads a string in quotes that its syntax does not have. The syntax's own delimiter may
    follow.

    Whether a backslash begins an escape there is in doubt, unless no escape begins so, as in a
    regular expression. Any quote in it is in doubt too.
    """
    if not (yield from _delimited_text(source, quote, into, call, delimiter=delimiter)):
        yield from _escaped_text(source, quote, into, _no_escape)
        yield from source.accept(delimiter)
        if call:
            call.repaired()
    if not (yield from source.after_space(",", "}", "]", ")")):
        raise Malformed("a quote in a string was not escaped")


def _json_text_or_delimited(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None = None, *, delimiter: str
) -> Steps[None]:
    """Reads a string of JSON in a syntax with a delimiter of its own, which may follow."""
    if (yield from _delimited_text(source, quote, into, call, delimiter=delimiter)):
        return
    yield from _escaped_text(source, quote, into, partial(_json_escape_or_none, call))
    if (yield from source.accept(delimiter)) and call:
        call.repaired()


def _delimited_text(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None, *, delimiter: str
) -> Steps[bool]:
    """Reads a string between delimiters that have quotes around them. Returns whether there was
    one."""
    if not (yield from source.accept(delimiter)):
        return False
    yield from marked_text(source, delimiter, into)
    yield from source.accept(quote)
    if call:
        call.repaired()
    return True


def _piece(source: Source, quote: str, into: Into, escape: Escape) -> Steps[bool]:
    """Passes on some of a string. Returns whether the closing quote was read."""
    yield from source.match(PLAIN[quote[0]], into)
    if (yield from source.accept(quote)):
        return True
    if (yield from source.accept("\\")):
        into((yield from escape(source)))
    elif (yield from source.peek()):
        into(source.take(1))
    else:
        raise Malformed("a string has no end")
    return False


def marked_text(
    source: Source,
    quote: str,
    into: Into,
    call: ToolCallWriter | None = None,
    *,
    ends: tuple[str, ...] = (),
) -> Steps[None]:
    """Reads everything up to the same delimiter again, which may be missing after an argument.

    ends: the delimiters that may follow the call.
    """
    while not (yield from source.accept(quote)):
        yield from source.match(_marked(quote), into)
        if call and (yield from _may_end(source, call, ends)):
            if not (yield from _is_closed(source, quote, ends)):
                call.repaired()
                return
            call = None  # the next delimiter closes this string
        if not (yield from source.peek()):
            raise Malformed("a string has no end")
        if not (yield from source.comes(quote)):
            into(source.take(1))


@lru_cache(maxsize=8)
def _marked(quote: str) -> re.Pattern[str]:
    """Matches text within which no string can end that begins with this delimiter."""
    return re.compile(rf"[^,}}{re.escape(quote[0])}]+")


def _may_end(source: Source, call: ToolCallWriter, ends: tuple[str, ...]) -> Steps[bool]:
    """Whether another parameter of the call's tool follows, or the end of the call."""
    ahead = source.lookahead()
    sign = yield from ahead.accept(",", "}")
    yield from ahead.space()
    if sign == ",":
        key = yield from ahead.run(BARE_KEY)
        return key.strip() in call.awaited and bool((yield from ahead.accept(":", "=")))
    return bool(sign) and bool((yield from ahead.accept(*ends)))


def _is_closed(source: Source, quote: str, ends: tuple[str, ...]) -> Steps[bool]:
    """Whether the next delimiter of a string closes one, rather than opening another."""
    ahead = source.lookahead()
    if not (yield from ahead.up_to(quote)):
        return source.cut  # the string may have gone on
    yield from ahead.space()
    return bool((yield from ahead.accept(",", "}", "]", *ends)))


def _json_escape(source: Source) -> Steps[str]:
    """Reads an escape after its backslash."""
    kind = yield from source.peek()
    source.take(1)
    if kind == "u":
        return (yield from _utf16(source))
    if kind not in ESCAPES:
        raise Malformed("an escape that JSON does not know")
    return ESCAPES[kind]


def _json_escape_or_none(call: ToolCallWriter | None, source: Source) -> Steps[str]:
    kind = yield from source.peek()
    if kind in ESCAPES or kind == "u":
        return (yield from _json_escape(source))
    if call:
        call.repaired()
    return "\\"


def _no_escape(source: Source) -> Steps[str]:
    kind = yield from source.peek()
    if not kind or kind in KNOWN_ESCAPES:
        raise Malformed("a backslash that may begin an escape")
    return "\\"


def _python_escape(source: Source) -> Steps[str]:
    kind = yield from source.peek()
    if kind == "u" or kind in ESCAPES:
        return (yield from _json_escape(source))
    source.take(1)
    if kind in CODES:
        code = yield from _code(source, CODES[kind])
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise Malformed("no character")
        return chr(code)
    return PYTHON_ESCAPES.get(kind, "\\" + kind)  # as Python reads those that it does not know


def _utf16(source: Source) -> Steps[str]:
    """Reads a character after `\\u`, in one escape or, as a surrogate pair, in two."""
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
    """Returns a scalar as JSON; a text that looks like no other value is a string."""
    if not word:
        raise ValueError
    found = read_as(word, {}, "")
    return json.dumps(found) if isinstance(found, str) else word


JSON = Syntax({'"': json_text}, SCALAR, _json_scalar)


def python_syntax(*ends: str, bare_text: bool = False) -> Syntax:
    """ends: the delimiters that may follow calls. bare_text: as in `Syntax`."""
    return Syntax(
        dict.fromkeys(('"""', "'''", '"', "'"), partial(python_text, ends=ends)),
        SCALAR,
        _python_scalar,
        words={"True": "true", "False": "false", "None": "null"},
        brackets={"{": "}", "[": "]", "(": ")"},
        rules="python",
        opening="(",
        colon="=",
        key_quotes=(),
        bare_key=re.compile(r"\w+"),
        bare_text=bare_text,
        begins_with_key=True,
    )


def gemma_syntax(quote: str, opening: str = "{", *ends: str) -> Syntax:
    """Strings stand unescaped between two delimiters, and everything else is bare.

    opening: the bracket in front of the arguments; after a round one, arguments have equals signs.
    ends: the delimiters that may follow calls.
    """
    colon, other = (":", "=") if opening == "{" else ("=", ":")
    return Syntax(
        {
            quote: partial(marked_text, ends=ends),
            '"': partial(_json_text_or_delimited, delimiter=quote),
            "'": partial(_quoted_text, delimiter=quote),
        },
        BARE[opening],
        _bare_scalar,
        words={"True": "true", "False": "false", "None": "null"},
        brackets={"{": "}", "[": "]", "(": ")"},
        rules="free",
        opening=opening,
        colon=colon,
        other_colon=other,
        key_quotes=(quote, '"', "'"),
        bare_key=BARE_KEY,
        closing_quote=quote,
        untyped=True,
    )
