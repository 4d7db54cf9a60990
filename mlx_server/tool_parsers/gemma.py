"""`call:f{key:<|"|>text<|"|>,other:1}` between marks: Gemma 4, and FunctionGemma with marks of its
own.

Strings stand as they are between two marks, and everything else is bare: keys, numbers, literals.
"""

import re
from functools import partial

from mlx_server import limits
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.repair.coerce import read_as
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers import json_values, lacking
from mlx_server.tool_parsers.bare_text import text_of
from mlx_server.tool_parsers.calls import Call, Calls
from mlx_server.tool_parsers.literals import Literals, Spelling
from mlx_server.tool_parsers.notation import Block, Notation, parsed
from mlx_server.tool_parsers.parameters import Unwritable
from mlx_server.tool_parsers.pattern_text import searched
from mlx_server.tool_parsers.source import Into, Source, Steps
from mlx_server.tool_parsers.value_schema import Member, Value, arguments_of

NAME = re.compile(r"[^\s{}<>]+")
KEY = re.compile(r'[^:{}\[\],"<>]+')
BARE = re.compile(r'[^{}\[\],"<>]+')

WORDS = {"None": "null", "True": "true", "False": "false"}
"""The templates write some values as Python does."""


def _read(close: str, quote: str, source: Source, calls: Calls) -> Steps[None]:
    yield from source.space()
    yield from source.expect("call:")
    name: list[str] = []
    yield from source.match(NAME, name.append)
    yield from source.space()
    yield from source.expect("{")
    call = calls.start("".join(name))
    yield from _arguments(source, quote, call)
    yield from source.space()
    if not (yield from source.accept(close)) and (yield from source.peek()):
        raise Malformed("more than a call between the marks")
    call.finish()


def _arguments(source: Source, quote: str, call: Call) -> Steps[None]:
    while not (yield from _ends(source, "}")):
        key = yield from _key(source, quote)
        if call.streams(key) and (yield from source.accept(quote)):
            yield from _text(source, quote, partial(call.text, key))
            call.end_text(key)
        elif (yield from source.accept(quote)):
            call.value(key, (yield from _string(source, quote)))
        elif (yield from source.peek()) in ("{", "[", '"'):
            call.value(key, (yield from _value(source, quote)))
        else:
            call.untyped(key, (yield from _bare(source)))


def _value(source: Source, quote: str, depth: int = limits.CALL_DEPTH.value) -> Steps[object]:
    if not depth:
        raise Malformed("nested too deep")
    match (yield from source.accept(quote, "{", "[", '"')):
        case "{":
            return (yield from _object(source, quote, depth - 1))
        case "[":
            return (yield from _array(source, quote, depth - 1))
        case '"':
            return (yield from json_values.string(source))
        case "":
            return read_as((yield from _bare(source)), {}, "")
    return (yield from _string(source, quote))


def _object(source: Source, quote: str, depth: int) -> Steps[dict[str, object]]:
    found: dict[str, object] = {}
    while not (yield from _ends(source, "}")):
        key = yield from _key(source, quote)
        found[key] = yield from _value(source, quote, depth)
    return found


def _array(source: Source, quote: str, depth: int) -> Steps[list[object]]:
    found: list[object] = []
    while not (yield from _ends(source, "]")):
        found.append((yield from _value(source, quote, depth)))
    return found


def _ends(source: Source, bracket: str) -> Steps[bool]:
    """Reads what is between two values, or behind the last; whether there is no more."""
    yield from source.space()
    while (found := (yield from source.accept(bracket, ","))) == ",":
        yield from source.space()
    return bool(found)


def _key(source: Source, quote: str) -> Steps[str]:
    if (yield from source.accept(quote)):
        key = yield from _string(source, quote)
    elif (yield from source.accept('"')):
        key = yield from json_values.string(source)
    else:
        pieces: list[str] = []
        yield from source.match(KEY, pieces.append)
        key = "".join(pieces).strip()
    yield from source.space()
    yield from source.expect(":")
    yield from source.space()
    return key


def _string(source: Source, quote: str) -> Steps[str]:
    pieces: list[str] = []
    yield from _text(source, quote, pieces.append)
    return "".join(pieces)


def _text(source: Source, quote: str, into: Into) -> Steps[None]:
    if not (yield from source.up_to(quote, into=into)):
        raise Malformed("a string has no end")


def _bare(source: Source) -> Steps[str]:
    pieces: list[str] = []
    yield from source.match(BARE, pieces.append)
    word = "".join(pieces).strip()
    if not word:
        raise Malformed("a value is missing")
    return WORDS.get(word, word)


def _call_of(spelling: Spelling, lark: Lark, tool: Tool) -> str:
    if not NAME.fullmatch(tool.name):
        raise Unwritable(f"the name of the tool {tool.name!r}")
    inside = Literals(lark, spelling).members(arguments_of(tool))
    return lark.rule(f"{quoted('call:' + tool.name + '{')} {inside} {quoted('}')}")


def _spelling(quote: str) -> Spelling:
    def string(lark: Lark, value: Value) -> str | None:
        if not searched(value.schema.get("pattern", "")):
            return None
        text = lark.terminal(f"{text_of(value, lark)} & {lark.anything(quote)}")
        return f"{lark.text(quote)} {lark.up_to(quote, text)}"

    def text(lark: Lark, text: str) -> str | None:
        if quote in text and lark.text(quote) == quoted(quote):
            return None
        return f"{lark.text(quote)} {quoted(text)} {lark.text(quote)}"

    def key(lark: Lark, name: str) -> str | None:
        if KEY.fullmatch(name) and name == name.strip():
            return quoted(name)
        return text(lark, name)

    return Spelling(
        string=string,
        text=text,
        key=key,
        any_key=lambda lark: lark.terminal(r"/[A-Za-z0-9_]+/"),
        words={True: ("true",), False: ("false",), None: ("null",)},
        ordered=_sorted,
    )


def _sorted(found: list[Member]) -> list[Member]:
    """As the templates show objects."""
    return sorted(found, key=lambda member: member.key.lower())


def _notation(opens: str, closes: str, quote: str) -> Notation:
    read = partial(_read, closes, quote)
    block = Block(partial(_call_of, _spelling(quote)), after=closes, lacks=lacking.one_by_one)
    return Notation(read, opens=(opens,), closes=(closes,), inner=(quote,), blocks=(block,))


GEMMA4 = _notation("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _notation("<start_function_call>", "<end_function_call>", "<escape>")

parse_tool_call = partial(parsed, GEMMA4)
parse_function_gemma = partial(parsed, FUNCTION_GEMMA)
