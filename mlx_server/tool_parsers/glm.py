"""GLM-4.5 and later: `<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>`
for each argument, on lines of their own or not.

GLM is known to stutter: it begins a call twice, or makes the same one again at once.
"""

import re
from collections.abc import Callable

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers import unsupported_keywords
from mlx_server.tool_parsers.bare_text import bare_value_rule
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter, ToolCallWriter
from mlx_server.tool_parsers.parameters import UncallableTool, one_by_one_rule
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.value_schema import MemberSchema, arguments_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
NAME = re.compile(r"[^<\n]+")


def _read_block(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    name, mark = yield from _call_name(source, calls)
    call = calls.start_unless_repeated(name)
    while mark == KEY:
        mark = yield from _argument(source, call)
    call.finish()


def _call_name(source: Source, calls: ToolCallEmitter) -> Steps[tuple[str, str]]:
    """And the mark behind it."""
    while True:
        pieces: list[str] = []
        yield from source.space()
        yield from source.match(NAME, pieces.append)
        name = "".join(pieces)
        if name and not calls.knows(name):
            raise Malformed(f"there is no tool {name!r}")
        yield from source.space()
        mark = yield from source.accept(KEY, CLOSE)
        if mark or (yield from source.stopped()):
            return name, mark
        yield from source.expect(OPEN)  # begun again


def _argument(source: Source, call: ToolCallWriter) -> Steps[str]:
    """Returns the mark behind it, read."""
    pieces: list[str] = []
    yield from source.up_to(KEY_END, "\n", into=pieces.append)
    yield from source.space()
    yield from source.expect(VALUE)
    key = "".join(pieces).strip()
    if call.streams(key):
        mark = yield from _value(source, lambda piece: call.text(key, piece))
        call.end_text(key)
        return mark
    pieces = []
    mark = yield from _value(source, pieces.append)
    call.untyped(key, "".join(pieces))
    return mark


def _value(source: Source, into: Callable[[str], None]) -> Steps[str]:
    """Passes a value on, which may hold the marks that would end it; returns the mark behind
    it, read."""
    inside = 0
    """Arguments that were begun in it."""
    while mark := (yield from source.up_to(VALUE_END, CLOSE, KEY_END, into=into)):
        if mark == KEY_END:
            mark += yield from source.space()
            begun = yield from source.accept(VALUE)
            inside += bool(begun)
            mark += begun
        elif inside:
            inside -= mark == VALUE_END
        else:
            space = yield from source.space()
            if mark == VALUE_END and (following := (yield from source.accept(KEY, CLOSE))):
                return following
            if (yield from source.comes(OPEN)) or (yield from source.stopped()):
                return CLOSE  # the mark itself, or one that was forgotten
            mark += space
        into(mark)
    raise Malformed("a value without an end")


def _call_of(lark: Lark, tool: Tool) -> str:
    if not NAME.fullmatch(tool.name) or tool.name != tool.name.strip():
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    space = lark.terminal(r"/\n[\x20\n]?/")  # others would be the name's

    def written(member: MemberSchema) -> str | None:
        key = member.key
        if key != key.strip() or "\n" in key or KEY_END in key:
            return None
        name = f"{lark.text(KEY)} {quoted(key)} {lark.text(KEY_END)} {space}? {lark.text(VALUE)}"
        return f"{space}? {name} {bare_value_rule(member.value, lark, VALUE_END, CLOSE, KEY_END)}"

    arguments = one_by_one_rule(arguments_of(tool), written, lark)
    return lark.rule(f"{quoted(tool.name)} {arguments}")


GLM = CallFormat(
    _read_block,
    opens=(OPEN,),
    closes=(CLOSE,),
    inner=(KEY, KEY_END, VALUE, VALUE_END),
    blocks=(
        BlockGrammar(
            _call_of,
            after=CLOSE,
            unsupported=unsupported_keywords.unsupported_as_text,
            space=r"\n?",
        ),
    ),
)
