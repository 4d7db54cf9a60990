"""Python literals as models write them, value by value, while they are being written."""

import json
import re
from typing import Any

from mlx_server import limits
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.repair.exact import Written
from mlx_server.repair.malformed import Malformed
from mlx_server.schemas.view import View
from mlx_server.tool_parsers import json_values
from mlx_server.tool_parsers.literals import Spelling
from mlx_server.tool_parsers.source import Into, Source, Steps
from mlx_server.tool_parsers.value_schema import Value

QUOTES = ('"""', "'''", '"', "'")
PLAIN = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}

BEHIND = ",)]}:"
"""What can follow a string where a value stands."""

ESCAPES = {"'": "'", "a": "\a", "v": "\v", "0": "\0", "\n": ""} | json_values.ESCAPES
HEXADECIMAL = {"x": 2, "U": 8}
WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


def value(source: Source, depth: int = limits.CALL_DEPTH.value) -> Steps[Any]:
    """Any literal; white space before it is read."""
    yield from source.space()
    if not depth:
        raise Malformed("nested too deep")
    match (yield from source.accept(*QUOTES, "{", "[", "(")):
        case "{":
            return (yield from _mapping(source, depth - 1))
        case "[":
            return (yield from _sequence(source, "]", depth - 1))
        case "(":
            return (yield from _sequence(source, ")", depth - 1))
        case "":
            return (yield from _scalar(source))
        case quote:
            pieces: list[str] = []
            yield from text(source, quote, pieces.append)
            return "".join(pieces)


def text(source: Source, quote: str, into: Into) -> Steps[None]:
    """A string after its opening quote, passed on as it comes.

    A quote that could not be followed by what follows is a part of it: templates that show past
    calls to a model escape nothing. Line breaks are let pass.
    """
    source.quoted = True
    while True:
        yield from source.match(PLAIN[quote[0]], into)
        if (yield from source.accept(quote)):
            space = yield from source.space()
            following = yield from source.peek()
            if not following or following in BEHIND:
                source.quoted = False
                return
            into(quote + space)
        elif (yield from source.accept("\\")):
            into((yield from _escape(source)))
        elif (yield from source.peek()):
            into(source.take(1))
        else:
            raise Malformed("a string has no end")


def more(source: Source, bracket: str) -> Steps[bool]:
    """After an item: whether there is another one; a comma may stand behind the last."""
    yield from source.space()
    comma = yield from source.accept(",")
    yield from source.space()
    if (yield from source.accept(bracket)):
        return False
    if not comma:
        raise Malformed("expected a comma")
    return True


def _escape(source: Source) -> Steps[str]:
    kind = yield from source.peek()
    if kind == "u":
        return (yield from json_values.escape(source))
    source.take(1)
    if kind in HEXADECIMAL:
        code = yield from json_values.hexadecimal(source, HEXADECIMAL[kind])
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise Malformed("no character")
        return chr(code)
    return ESCAPES.get(kind, "\\" + kind)  # as Python reads those that it does not know


def _sequence(source: Source, bracket: str, depth: int) -> Steps[list[Any]]:
    found: list[Any] = []
    yield from source.space()
    if (yield from source.accept(bracket)):
        return found
    while True:
        found.append((yield from value(source, depth)))
        if not (yield from more(source, bracket)):
            return found


def _mapping(source: Source, depth: int) -> Steps[Any]:
    """A dict; or a set, which to JSON is a list."""
    found: dict[str, Any] = {}
    members: list[Any] = []
    yield from source.space()
    if (yield from source.accept("}")):
        return found
    while True:
        key = yield from value(source, depth)
        yield from source.space()
        if (yield from source.accept(":")):
            name = key if isinstance(key, str) else json.dumps(key)
            found[name] = yield from value(source, depth)
        else:
            members.append(key)
        if not (yield from more(source, "}")):
            break
    if found and members:
        raise Malformed("half a dict and half a set")
    return found or members


def _scalar(source: Source) -> Steps[Any]:
    pieces: list[str] = []
    yield from source.match(json_values.SCALAR, pieces.append)
    word = "".join(pieces)
    if word in WORDS:
        return WORDS[word]
    for kind in (int, Written):
        try:
            return kind(word)
        except ValueError:
            continue
    raise Malformed("no Python value")


ESCAPED = (
    r"\\(?:[\x22'\\\/abfnrtv0]|x[0-9a-fA-F]{2}"
    r"|u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"
)
"""In a grammar, all but halves of surrogate pairs."""


def _string_of(lark: Lark, value: Value) -> str | None:
    if value.schema.keys() & {"pattern", "format"}:
        return None
    least, most = value.counts("minLength", "maxLength")
    times = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
    return lark.rule(
        " | ".join(
            lark.terminal(f"/{quote}(?:[^{quote}\\\\]|{ESCAPED}){times}{quote}/")
            for quote in (r"\x22", "'")
        )
    )


def _text_of(lark: Lark, text: str) -> str:
    whole = json.dumps(text, ensure_ascii=False)
    plain = text.isprintable() and not set(text) & set("'\"\\")
    return lark.rule(" | ".join(map(quoted, [whole, *([f"'{text}'"] if plain else [])])))


SPELLING = Spelling(
    string=_string_of,
    text=_text_of,
    key=_text_of,
    any_key=lambda lark: _string_of(lark, Value({}, View({}))) or "",
    words={True: ("True", "true"), False: ("False", "false"), None: ("None", "null")},
)
