"""Elements between `<|open|>name<|sep|>` and `<|close|>name<|sep|>`: Kimi K3.

A call's arguments are elements too, each with its type, or one element with all of them as JSON.

It has a reader of its own: in no other format do openings have attributes, in any order and with
quotes and spaces that vary, so a record that describes them would have this one instance.
"""

import re
from functools import partial

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.repair.model_json import Malformed
from mlx_server.schemas import unsupported_arguments
from mlx_server.schemas.values import MemberSchema, arguments_of
from mlx_server.tool_parsers import values
from mlx_server.tool_parsers.bare_text import marked_text
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat
from mlx_server.tool_parsers.call_writer import ToolCallWriter
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_rule import json_rule
from mlx_server.tool_parsers.parameters import UncallableTool, one_by_one_rule
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"

QUOTE = '"'
ATTRIBUTE = re.compile(r"""\b(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'=]+))""")
WRITTEN = re.compile(r'(?>\s*\w+="[^"]*")*+')
"""Attributes without a mistake."""


def beginning(element: str) -> str:
    return f"{OPEN}{element}{SEPARATOR}"


def end(element: str) -> str:
    return f"{CLOSE}{element}{SEPARATOR}"


def spaced(delimiter: str, element: str) -> tuple[str, ...]:
    """Returns an opening or closing delimiter with spaces in it, which no template writes."""
    spaces = ((" ", ""), ("", " "), (" ", " "))
    return tuple(f"{delimiter}{before}{element}{after}{SEPARATOR}" for before, after in spaces)


def _ends(element: str) -> tuple[str, ...]:
    return (end(element), *spaced(CLOSE, element))


def _opens(element: str) -> tuple[str, ...]:
    """Returns the beginnings of an opening delimiter that has attributes."""
    return OPEN + element, f"{OPEN} {element}"


TOOLS, TOOLS_END = beginning("tools"), end("tools")


def _read_block(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    while True:
        yield from source.space()
        found = yield from source.accept(*_opens("call"), *_ends("tools"))
        if found in _ends("tools"):
            return
        if not found:
            # complete calls count, but what follows them is not part of them
            if (yield from source.peek()):
                raise Malformed("more than calls among the tools")
            return
        yield from _read_call(source, calls)


def _read_calls(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """Reads calls without a section around them, after the first one's opening."""
    yield from _read_call(source, calls)
    while (yield from source.after_space(*_opens("call"))):
        yield from source.space()
        yield from source.expect(*_opens("call"))
        yield from _read_call(source, calls)


def _read_call(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    attributes, has_slips = yield from _read_attributes(source)
    call = calls.start(attributes.get("tool", ""))
    if has_slips:
        call.repaired("format")
    openings = (*_opens("argument"), *_opens("json"))
    while True:
        yield from source.space()
        found = yield from source.expect(*openings, "{", *_ends("call"))
        if found in _ends("call"):
            call.finish()
            return
        if found == "{":
            call.repaired("format")
            yield from values.arguments(source, JSON, lambda: call, _ends("call"))
        elif found in _opens("argument"):
            yield from _read_argument(source, call)
        else:
            yield from _read_attributes(source)
            yield from source.space()
            yield from source.expect("{")
            yield from values.arguments(source, JSON, lambda: call)
            yield from source.space()
            yield from source.expect(*_ends("json"))


def _read_argument(source: Source, call: ToolCallWriter) -> Steps[None]:
    attributes, has_slips = yield from _read_attributes(source)
    if has_slips:
        call.repaired("format")
    key, type = attributes.get("key"), attributes.get("type", "string")
    if key is None:
        raise Malformed("an argument has no key")
    key = call.meant(key)
    streams = type == "string" and call.streams(key)
    pieces: list[str] = []
    into = partial(call.text, key) if streams else pieces.append
    if not (yield from source.up_to(*_ends("argument"), into=into)):
        raise Malformed("an argument has no end")
    if streams:
        call.end_text(key)
    elif type == "string":
        call.value(key, "".join(pieces))
    else:
        call.untyped(key, "".join(pieces))


def _read_attributes(source: Source) -> Steps[tuple[dict[str, str], bool]]:
    """Returns the attributes of an opening delimiter, and whether they are written with
    mistakes."""
    pieces: list[str] = []
    if (yield from source.up_to(OPEN, CLOSE, SEPARATOR, into=pieces.append)) != SEPARATOR:
        raise Malformed("an opening has no end")
    text = "".join(pieces)
    found = {
        match[1]: _unescaped(match[match.lastindex or 0]) for match in ATTRIBUTE.finditer(text)
    }
    return found, not WRITTEN.fullmatch(text.rstrip())


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _call_of(lark: Lark, tool: Tool) -> str:
    if not _is_writable(tool.name):
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    number = lark.terminal("/[1-9][0-9]{0,2}/")
    named = quoted(f'call tool="{_escaped(tool.name)}" index="')
    head = f"{lark.text(OPEN)} {named} {number} {quoted(QUOTE)} {lark.text(SEPARATOR)}"

    def written(member: MemberSchema) -> str | None:
        if not _is_writable(member.key):
            return None
        options = []
        for type in sorted(member.value.types):
            said = "number" if type == "integer" else type
            named = quoted(f'argument key="{_escaped(member.key)}" type="{said}"')
            if type == "string":
                value = marked_text(member.value, lark, end("argument"))
            else:
                value = f"{json_rule(member.value, lark, type)} {lark.text(end('argument'))}"
            options.append(f"{lark.text(OPEN)} {named} {lark.text(SEPARATOR)} {value}")
        return lark.rule(" | ".join(options))

    arguments = one_by_one_rule(arguments_of(tool), written, lark)
    return lark.rule(f"{head} {arguments} {lark.text(end('call'))}")


def _is_writable(name: str) -> bool:
    return not any(delimiter in name for delimiter in (OPEN, CLOSE, SEPARATOR))


def _escaped(name: str) -> str:
    return name.replace("&", "&amp;").replace('"', "&quot;")


KIMI_K3 = CallFormat(
    _read_block,
    opens=(TOOLS,),
    closes=(TOOLS_END,),
    blocks=(
        BlockGrammar(
            _call_of,
            between="",
            after=TOOLS_END,
            unsupported=unsupported_arguments.unsupported_as_text,
        ),
    ),
)
KIMI_K3_SPACED = CallFormat(
    _read_block, opens=spaced(OPEN, "tools"), closes=_ends("tools"), repairs=("format",)
)
KIMI_K3_CALLS = CallFormat(
    _read_calls, opens=_opens("call"), may_close=_ends("tools"), repairs=("format",)
)
