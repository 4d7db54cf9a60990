"""GLM-4 before 4.5: an answer that is a tool's name and, on the next line, arguments as JSON."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from mlx_server.grammars.lark import Lark, literally
from mlx_server.grammars.schema import arguments
from mlx_server.messages import Tool
from mlx_server.tool_parsers import values
from mlx_server.tool_parsers.call_format import CallFormat, UnmarkedBlockGrammar, parse_calls
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON


def call_formats(tools: Sequence[Tool]) -> tuple[CallFormat, ...]:
    """One for each tool, as nothing but its name tells a call from text."""
    return tuple(
        CallFormat(
            partial(_arguments, name=tool.name),
            begins=(f"{tool.name}\n",),
            blocks=(BARE,),
        )
        for tool in tools
    )


def _call_of(lark: Lark, tool: Tool) -> str:
    return f"{lark.terminal(f'/{_head(tool)}/')} {_rest(lark, tool)}"


def _head(tool: Tool) -> str:
    return literally(tool.name) + r"\n"


def _rest(lark: Lark, tool: Tool) -> str:
    return arguments(tool.parameters, lark, strict=tool.strict)


BARE = UnmarkedBlockGrammar(call=_call_of, head=_head, rest=_rest)


def _arguments(source: Source, calls: ToolCallEmitter, name: str) -> Steps[None]:
    yield from source.space()
    yield from source.expect("{")
    call = calls.start(name)
    yield from values.arguments(source, JSON, lambda: call)
    call.finish()


def _read_block(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    name: list[str] = []
    yield from source.up_to("\n", into=name.append)
    yield from _arguments(source, calls, "".join(name))


def parse_tool_call(text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return parse_calls(CallFormat(_read_block), text, tools)
