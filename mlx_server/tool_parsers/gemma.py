"""`call:f{key:<|"|>text<|"|>,other:1}` between marks: Gemma 4, and FunctionGemma with marks of its
own.

Strings stand as they are between two marks, and everything else is bare: keys, numbers, literals.
"""

import re
from functools import partial

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers import spellings, unsupported_keywords, values
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat, parse_calls
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.literal_syntax import LiteralGrammar, LiteralSyntax
from mlx_server.tool_parsers.parameters import UncallableTool
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import gemma_syntax
from mlx_server.tool_parsers.value_schema import arguments_of

NAME = re.compile(r"[^\s{}<>]+")


def _read_block(close: str, quote: str, source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.space()
    yield from source.expect("call:")
    name: list[str] = []
    yield from source.match(NAME, name.append)
    yield from source.space()
    yield from source.expect("{")
    call = yield from values.arguments(
        source, gemma_syntax(quote), partial(calls.start, "".join(name))
    )
    yield from source.space()
    if not (yield from source.accept(close)) and (yield from source.peek()):
        raise Malformed("more than a call between the marks")
    call.finish()


def _call_of(syntax: LiteralSyntax, lark: Lark, tool: Tool) -> str:
    if not NAME.fullmatch(tool.name):
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    inside = LiteralGrammar(lark, syntax).members(arguments_of(tool))
    return lark.rule(f"{quoted('call:' + tool.name + '{')} {inside} {quoted('}')}")


def _call_format(opens: str, closes: str, quote: str) -> CallFormat:
    read = partial(_read_block, closes, quote)
    block = BlockGrammar(
        partial(_call_of, spellings.gemma(quote)),
        after=closes,
        unsupported=unsupported_keywords.unsupported_one_by_one,
    )
    return CallFormat(read, opens=(opens,), closes=(closes,), inner=(quote,), blocks=(block,))


GEMMA4 = _call_format("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _call_format("<start_function_call>", "<end_function_call>", "<escape>")

parse_tool_call = partial(parse_calls, GEMMA4)
parse_function_gemma = partial(parse_calls, FUNCTION_GEMMA)
