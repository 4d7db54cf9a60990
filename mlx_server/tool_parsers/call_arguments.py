"""Reads and writes the arguments after the name of a call's tool: as JSON, or in another syntax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_server.grammars import schema
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.repair.model_json import Malformed
from mlx_server.schemas import unsupported_arguments
from mlx_server.schemas.report import UnsupportedKeyword
from mlx_server.schemas.values import MemberSchema, arguments_of
from mlx_server.tool_parsers import spellings, syntaxes, values
from mlx_server.tool_parsers.call_writer import ToolCallWriter
from mlx_server.tool_parsers.json_calls import check_end
from mlx_server.tool_parsers.literal_syntax import LiteralGrammar, LiteralSyntax
from mlx_server.tool_parsers.parameters import comma_separated_rule
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.values import Syntax


class CallArguments(Protocol):
    """The format of the arguments after the name of a call's tool."""

    def read(
        self, source: Source, start: Callable[[], ToolCallWriter], ends: tuple[str, ...]
    ) -> Steps[ToolCallWriter]:
        """Reads the arguments, and returns the writer of the call that `start` begins. ends: the
        delimiters that may follow them."""

    def write(self, lark: Lark, tool: Tool) -> str:
        """Returns the arguments that the tool's schema allows, as symbols of a rule."""

    def unsupported(self, tool: Tool) -> Sequence[UnsupportedKeyword]:
        """Returns the keywords of the tool's schema that are not enforced, besides those that are
        not enforced in JSON either."""


class JsonArguments:
    def read(
        self, source: Source, start: Callable[[], ToolCallWriter], ends: tuple[str, ...]
    ) -> Steps[ToolCallWriter]:
        yield from source.space()
        yield from source.expect("{")
        delimiters = tuple(
            delimiter for delimiter in ends if delimiter.strip("{[()]}")
        )  # others end values too
        call = yield from values.arguments(source, syntaxes.JSON, start, delimiters)
        yield from check_end(source, call, ends)
        return call

    def write(self, lark: Lark, tool: Tool) -> str:
        return schema.arguments(tool.parameters, lark, strict=tool.strict)

    def unsupported(self, tool: Tool) -> Sequence[UnsupportedKeyword]:
        return ()


class LeftOutArguments(JsonArguments):
    """Arguments that a model did not write although it wrote the delimiter before them."""

    def read(
        self, source: Source, start: Callable[[], ToolCallWriter], ends: tuple[str, ...]
    ) -> Steps[ToolCallWriter]:
        yield from source.space()
        return start()


@dataclass(frozen=True)
class LiteralArguments:
    """Arguments in a syntax of their own, after their opening bracket."""

    syntax: Syntax
    spelling: LiteralSyntax

    def read(
        self, source: Source, start: Callable[[], ToolCallWriter], ends: tuple[str, ...]
    ) -> Steps[ToolCallWriter]:
        own = ends if self.syntax.rules == "free" else ()
        call = yield from values.arguments(source, self.syntax, start, own)
        while self.syntax.rules == "free" and (yield from source.after_space("}")):
            yield from source.space()
            yield from source.expect("}")
            call.repaired()
        if (yield from source.after_space("'", '"', ")", "}")):
            raise Malformed("a quote in a string was not escaped")
        return call

    def write(self, lark: Lark, tool: Tool) -> str:
        literals = LiteralGrammar(lark, self.spelling)

        def written(member: MemberSchema) -> str | None:
            key, bare = member.key, self.syntax.bare_key
            if bare and not bare.fullmatch(key):
                return None
            return f"{quoted(key + self.syntax.colon)} {literals.value(member.value)}"

        closing = quoted(self.syntax.brackets[self.syntax.opening])
        if self.syntax.colon == ":":  # as in the objects of this syntax
            return f"{literals.members(arguments_of(tool))} {closing}"
        comma = lark.terminal(r"/,\x20?/")
        return f"{comma_separated_rule(arguments_of(tool), written, lark, comma)} {closing}"

    def unsupported(self, tool: Tool) -> Sequence[UnsupportedKeyword]:
        return unsupported_arguments.unsupported_one_by_one(tool)


JSON = JsonArguments()
LEFT_OUT = LeftOutArguments()
PYTHON = LiteralArguments(syntaxes.python_syntax(), spellings.PYTHON)


def python_arguments(*ends: str, bare_text: bool = False) -> LiteralArguments:
    """ends: the delimiters that may follow the calls. bare_text: whether a word without quotes is
    text, rather than a variable."""
    return LiteralArguments(syntaxes.python_syntax(*ends, bare_text=bare_text), spellings.PYTHON)


def gemma_arguments(quote: str, opening: str = "{", *ends: str) -> LiteralArguments:
    """ends: the delimiters that may follow the calls."""
    return LiteralArguments(syntaxes.gemma_syntax(quote, opening, *ends), spellings.gemma(quote))
