"""`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2.

Calls stand in a section; what else stands there is no part of the answer. The name of a call is in
its id, which is the model's own.
"""

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
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


def _read_block(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """After the mark of a section, or of a call that stands in none."""
    finished = calls.finished
    while True:
        passed: list[str] = []
        marks = (CALL, ARGUMENTS, CALL_END, SECTION_END)
        found = yield from source.up_to(*marks, into=passed.append)
        between = "".join(passed).strip()
        calls_alone = not between or (found == SECTION_END and calls.finished > finished)
        if found == ARGUMENTS:
            yield from _call(source, calls, between)
        elif calls_alone and found in (SECTION_END, ""):
            return
        elif found != CALL:
            raise Malformed("more than calls in the section")


def _call(source: Source, calls: ToolCallEmitter, id: str) -> Steps[None]:
    if not calls.knows(_name(id)):
        raise Malformed(f"there is no tool {id!r}")
    yield from source.space()
    begins = yield from source.expect("{", CALL_END)
    call = calls.start(_name(id), id if _name(id) != id else None)
    if begins == "{":
        yield from values.arguments(source, JSON, lambda: call)
        yield from source.space()
        yield from source.expect(CALL_END)
    call.finish()


def _name(id: str) -> str:
    name, _, number = id.rpartition(":")
    return name if number.isdecimal() else id


def _repaired(text: str) -> list[tuple[str, dict[str, Any]]]:
    before, _, arguments = text.partition(ARGUMENTS)
    found = loads(arguments)
    if not isinstance(found, dict):
        raise Malformed("arguments should be an object")
    return [(_name(before.rpartition(CALL)[2].strip()), found)]


def _call_of(lark: Lark, tool: Tool) -> str:
    id = f"{quoted('functions.' + tool.name + ':')} {lark.terminal('/[0-9]{1,4}/')}"
    made = arguments(tool.parameters, lark, strict=tool.strict)
    return f"{id} {lark.text(ARGUMENTS)} {made} {lark.text(CALL_END)}"


MARKS = (ARGUMENTS, CALL, CALL_END)

KIMI_K2 = CallFormat(
    _read_block,
    opens=(SECTION,),
    closes=(CALL_END, SECTION_END),
    inner=MARKS,
    repair=_repaired,
    blocks=(BlockGrammar(_call_of, before=CALL, between=CALL, after=SECTION_END),),
)

WITHOUT_SECTION = CallFormat(
    _read_block,
    opens=(CALL,),
    closes=(CALL_END, SECTION_END),
    inner=MARKS,
    repair=_repaired,
    blocks=(BlockGrammar(_call_of),),
)

parse_tool_call = partial(parse_calls, KIMI_K2)
