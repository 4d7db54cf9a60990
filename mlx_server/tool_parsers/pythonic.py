"""Calls as Python: `[f(a=1, b="x"), g()]`, between marks, bare, or one a line (OLMo)."""

import re
from functools import partial

from mlx_server.grammars.lark import Lark, literally, quoted
from mlx_server.messages import Tool
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers import marked_json, spellings, unsupported_keywords, values
from mlx_server.tool_parsers.call_format import (
    BlockGrammar,
    CallFormat,
    UnmarkedBlockGrammar,
    parse_calls,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.literal_syntax import LiteralGrammar
from mlx_server.tool_parsers.parameters import UncallableTool, comma_separated_rule
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import PYTHON
from mlx_server.tool_parsers.value_schema import MemberSchema, arguments_of

NAME = re.compile(r"[\w.\-]+")
KEY = re.compile(r"\w+")


def marked_python(opens: str, closes: str, *, by_line: bool = False) -> CallFormat:
    """by_line: calls stand on lines of their own, rather than in a list."""
    block = (
        BlockGrammar(
            call_of,
            between="\n",
            after=closes,
            unsupported=unsupported_keywords.unsupported_one_by_one,
            space="",
        )
        if by_line
        else BlockGrammar(
            call_of,
            before="[",
            between=", ",
            after="]" + closes,
            unsupported=unsupported_keywords.unsupported_one_by_one,
            may_be_empty=True,
            space="",
        )
    )
    return CallFormat(partial(_block, closes), opens=(opens,), closes=(closes,), blocks=(block,))


def call_of(lark: Lark, tool: Tool) -> str:
    return lark.rule(f"{lark.terminal(f'/{_head(tool)}/')} {_arguments(lark, tool)}")


def _head(tool: Tool) -> str:
    if not NAME.fullmatch(tool.name):
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    return literally(tool.name + "(")


def _arguments(lark: Lark, tool: Tool) -> str:
    """And the bracket behind them."""
    literals = LiteralGrammar(lark, spellings.PYTHON)

    def written(member: MemberSchema) -> str | None:
        if not KEY.fullmatch(member.key):
            return None
        return f"{quoted(member.key + '=')} {literals.value(member.value)}"

    comma = lark.terminal(r"/,\x20?/")
    return f"{comma_separated_rule(arguments_of(tool), written, lark, comma)} {quoted(')')}"


def call(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """`f(key=value)`, its name included. It is one as soon as its first key is read."""
    name = yield from word(source, NAME)
    if not calls.knows(name):
        name = name.removesuffix(".call")  # as Llama calls what is built in
    yield from source.expect("(")
    made = yield from values.arguments(source, PYTHON, partial(calls.start, name))
    made.finish()


def bare_list(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """After its bracket: calls in Python, or in JSON."""
    yield from source.space()
    if (yield from source.peek()) == "{":
        yield from marked_json.array(source, calls)
        return
    more = True
    while more:
        yield from call(source, calls)
        more = yield from values.goes_on(source, PYTHON, "]", first=False)


def word(source: Source, pattern: re.Pattern[str]) -> Steps[str]:
    pieces: list[str] = []
    yield from source.match(pattern, pieces.append)
    if not pieces:
        raise Malformed("expected a word")
    return "".join(pieces)


def _block(closes: str, source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.space()
    yield from source.accept("[")
    yield from source.space()
    if (yield from source.accept("{")):
        yield from marked_json.objects(source, calls, (closes,))
        return
    while True:
        yield from source.space()
        found = yield from source.accept(",", ";", "]", closes)
        if found == closes or not (found or (yield from source.peek())):
            return
        if not found:
            yield from call(source, calls)


PYTHONIC = CallFormat(
    bare_list,
    begins=("[",),
    blocks=(
        UnmarkedBlockGrammar(
            call_of,
            between=", ",
            after="]",
            unsupported=unsupported_keywords.unsupported_one_by_one,
            space="",
            head=lambda tool: r"\[" + _head(tool),
            rest=_arguments,
        ),
    ),
)

parse_tool_call = partial(parse_calls, marked_python("<|tool_call_start|>", "<|tool_call_end|>"))
