"""Calls whose tool's name is a line of its own, and JSON the next: GLM-4's and functionary's."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.repair.model_json import Malformed, loads
from mlx_server.tool_parsers import values
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import as_object, check_end
from mlx_server.tool_parsers.named_calls import NamedCallFormat
from mlx_server.tool_parsers.parameters import UncallableTool
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON

_GLM4 = NamedCallFormat(
    name=re.compile(r"[^\n]+"), after_name="\n", repair_unit="call", ends_answer=True
)
_FUNCTIONARY = replace(_GLM4, follows=(">>>",))
_FUNCTIONARY_V2 = replace(_GLM4, follows=("<|from|>", "<|recipient|>", "<|content|>"))

FENCE = "```"
NAMES = ("{}", "functions.{}", "`{}`", "{}\n```json", "{}\n```")
DELIMITERS = (">>>", ">>> ")


def glm4(tools: Sequence[Tool]) -> tuple[CallFormat, ...]:
    """Makes one format for each tool, since only its name distinguishes a call from text."""
    made = _GLM4.call_format()
    return tuple(
        each
        for tool in tools
        for each in (
            _with_slips(tool.name),
            replace(made, read=partial(_GLM4.read, name=tool.name), begins=(f"{tool.name}\n",)),
        )
    )


def functionary(tools: Sequence[Tool]) -> tuple[CallFormat, ...]:
    """Makes GLM-4's formats with a delimiter before each message but the first, whose delimiter
    ends the prompt."""
    return tuple(
        each
        for tool in tools
        for each in (
            _with_slips(tool.name, *DELIMITERS),
            CallFormat(
                partial(_FUNCTIONARY.read, name=tool.name),
                opens=(f">>>{tool.name}\n",),
                begins=(f"{tool.name}\n",),
                blocks=(
                    _FUNCTIONARY_FIRST,
                    *(
                        replace(each, space="", read_on=_FUNCTIONARY_FIRST.read_on)
                        for each in _arguments_of(tool.name)
                    ),
                ),
            ),
        )
    )


def functionary_v2(tools: Sequence[Tool], turn: str, content: str) -> tuple[CallFormat, ...]:
    """Makes one format for each tool. turn: the text before a name, with which the prompt may end
    already. content: the text after a name, which contains a control token."""
    return tuple(
        CallFormat(
            partial(_FUNCTIONARY_V2.read, name=tool.name),
            opens=(f"{turn}{tool.name}{content}", f"{tool.name}{content}"),
            repair=partial(_repaired, tool.name),
            ends_answer=True,
            blocks=_arguments_of(tool.name),
        )
        for tool in tools
    )


# Slips around a name


def _with_slips(name: str, *delimiters: str) -> CallFormat:
    """Returns the format of calls where more or less than a line break stands between name and
    arguments. The names are shorter than the delimiters of the right format, which come first."""
    begins = tuple(written.format(name) for written in NAMES)
    return CallFormat(
        partial(_read_with_slips, name=name),
        opens=tuple(delimiter + each for delimiter, each in product(delimiters, begins)),
        begins=begins,
        repair=partial(_repaired, name),
        repairs=("format",),
        ends_answer=True,
    )


def _read_with_slips(source: Source, calls: ToolCallEmitter, name: str) -> Steps[None]:
    yield from source.accept("()")
    yield from source.accept(":")
    yield from source.space()
    yield from source.fence()
    yield from source.space()
    yield from source.expect("{")
    if not (yield from source.after_space('"', "'", "}")):
        raise Malformed("expected a key")  # a text may show a bracket after a name
    follows = (FENCE, *_FUNCTIONARY.follows)
    call = yield from values.arguments(source, JSON, lambda: calls.start(name), follows)
    yield from check_end(source, call, follows)
    if (yield from source.after_space(FENCE)):
        yield from source.space()
        yield from source.expect(FENCE)
    call.finish()


def _repaired(name: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    _, bracket, rest = text.partition("{")
    return [(name, as_object(loads((bracket + rest).strip().removesuffix(FENCE))))]


# The grammar of functionary's calls

_FUNCTIONARY_FIRST = replace(
    _FUNCTIONARY.block(), between=">>>", space="", read_on=r"[^\s>]|>[^>]|>>[^>]"
)
"""After a call only another message may follow."""


def _arguments_of(name: str) -> tuple[BlockGrammar, ...]:
    """Returns the grammar of one tool's call after its name, if that can be written."""
    if not _GLM4.name.fullmatch(name) or name != name.strip():
        return ()

    def call(lark: Lark, tool: Tool) -> str:
        if tool.name != name:
            raise UncallableTool(f"another tool than {name!r}")
        return _GLM4.arguments.write(lark, tool)

    return (BlockGrammar(call),)
