"""DeepSeek V2.5 to V3.1, R1 and what was distilled from it: a section of calls, each
`name<｜tool▁sep｜>{...}`, or, until R1, `function<｜tool▁sep｜>name` and the arguments in a fence.
"""

import re
from functools import partial
from typing import Any

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.grammars.schema import arguments
from mlx_server.messages import Tool
from mlx_server.repair.jsonish import loads
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers import values
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat, parse_calls
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.parameters import UncallableTool
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

WRITTEN = re.compile(rf"([^<>\n]*){SEPARATOR}(.*?){CALL_END}", re.DOTALL)
FENCED = re.compile(
    r"(?P<name>[^\n{]*)\n\s*(?:```(?:json)?)?(?P<arguments>.*?)(?:```)?\s*", re.DOTALL
)


def _section(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.space()
    yield from source.expect(CALL)
    yield from _calls(source, calls)


def _calls(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """What is left of a section, behind the mark of its first call."""
    mark = CALL
    while mark == CALL:
        yield from _call(source, calls)
        yield from source.space()
        mark = yield from source.accept(CALL, SECTION_END)
    if not mark and (yield from source.peek()):
        raise Malformed("more than calls in a section")


def _call(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    name = yield from _line(source, SEPARATOR)
    yield from source.space()
    if not (yield from source.accept("{")):
        name = yield from _line(source, "\n")
        yield from source.space()
        yield from source.fence()
        yield from source.space()
        yield from source.expect("{")
    call = calls.start(name)
    yield from values.arguments(source, JSON, lambda: call)
    yield from source.space()
    yield from source.accept("```")
    yield from source.space()
    if not (yield from source.accept(CALL_END)) and not (yield from source.stopped()):
        raise Malformed("more than arguments in a call")
    call.finish()


def _line(source: Source, end: str) -> Steps[str]:
    pieces: list[str] = []
    if (yield from source.up_to(end, "\n", into=pieces.append)) != end:
        raise Malformed("a name without an end")
    return "".join(pieces)


def _repaired(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [_fenced_call(first, rest) for first, rest in WRITTEN.findall(text)]


def _fenced_call(first: str, rest: str) -> tuple[str, dict[str, Any]]:
    fenced = FENCED.fullmatch(rest)
    name = fenced["name"] if fenced else first
    arguments = loads(fenced["arguments"] if fenced else rest)
    if not isinstance(arguments, dict):
        raise Malformed("arguments should be an object")
    return name, arguments


def _call_of(lark: Lark, tool: Tool) -> str:
    """Until R1 in a fence, then without."""
    if set(tool.name) & set("<>\n{"):
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    name, separator = quoted(tool.name), lark.text(SEPARATOR)
    made = arguments(tool.parameters, lark, strict=tool.strict)
    plain = f"{name} {separator} {made}"
    fenced = f'"function" {separator} {name} "\\n```json\\n" {made} "\\n```"'
    return f'({plain} | {fenced}) {lark.text(CALL_END)} "\\n"?'


MARKS = (SEPARATOR, CALL, CALL_END)

DEEPSEEK = CallFormat(
    _section,
    opens=(SECTION,),
    closes=(SECTION_END,),
    inner=MARKS,
    repair=_repaired,
    blocks=(BlockGrammar(_call_of, before=CALL, between=CALL, after=SECTION_END, space=""),),
)

WITHOUT_SECTION = CallFormat(
    _calls,
    opens=(CALL,),
    closes=(SECTION_END,),
    inner=MARKS,
    repair=_repaired,
    repairs=("unmarked",),
    blocks=(BlockGrammar(_call_of, space=""),),
)

parse_tool_call = partial(parse_calls, DEEPSEEK)
