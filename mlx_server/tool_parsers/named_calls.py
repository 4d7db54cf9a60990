"""Calls that begin with the tool's name: one record, one reader, one writer of grammars."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from mlx_server.events import RepairKind
from mlx_server.grammars import schema
from mlx_server.grammars.lark import Lark, literally, quoted
from mlx_server.messages import Tool
from mlx_server.repair.jsonish import loads
from mlx_server.repair.malformed import Malformed
from mlx_server.schemas.grammar import SPACE
from mlx_server.schemas.report import UnsupportedKeyword
from mlx_server.tool_parsers import marked_json, spellings, syntaxes, unsupported_keywords, values
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat, UnmarkedBlockGrammar
from mlx_server.tool_parsers.calls import ToolCallEmitter, ToolCallWriter
from mlx_server.tool_parsers.json_calls import as_object
from mlx_server.tool_parsers.literal_syntax import LiteralGrammar, LiteralSyntax
from mlx_server.tool_parsers.parameters import UncallableTool, comma_separated_rule
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.value_schema import MemberSchema, arguments_of
from mlx_server.tool_parsers.values import Syntax

ID = re.compile(r"[a-zA-Z0-9]+")
NAME = re.compile(r"[\w.\-]+")


class CallArguments(Protocol):
    """How the arguments of a call are written after the tool's name."""

    def read(
        self, source: Source, start: Callable[[], ToolCallWriter]
    ) -> Steps[ToolCallWriter]: ...

    def write(self, lark: Lark, tool: Tool) -> str:
        """Symbols of a rule."""

    def lacks(self, tool: Tool) -> Sequence[UnsupportedKeyword]:
        """What of the tool's schema they are not held to, beyond what JSON is not held to."""


class JsonArguments:
    def read(self, source: Source, start: Callable[[], ToolCallWriter]) -> Steps[ToolCallWriter]:
        yield from source.space()
        yield from source.expect("{")
        return (yield from values.arguments(source, syntaxes.JSON, start))

    def write(self, lark: Lark, tool: Tool) -> str:
        return schema.arguments(tool.parameters, lark, strict=tool.strict)

    def lacks(self, tool: Tool) -> Sequence[UnsupportedKeyword]:
        return ()


@dataclass(frozen=True)
class LiteralArguments:
    """Arguments in a syntax of their own, after their opening bracket."""

    syntax: Syntax
    spelling: LiteralSyntax

    def read(self, source: Source, start: Callable[[], ToolCallWriter]) -> Steps[ToolCallWriter]:
        return (yield from values.arguments(source, self.syntax, start))

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

    def lacks(self, tool: Tool) -> Sequence[UnsupportedKeyword]:
        return unsupported_keywords.unsupported_one_by_one(tool)


JSON = JsonArguments()
PYTHON = LiteralArguments(syntaxes.PYTHON, spellings.PYTHON)


def gemma_arguments(quote: str) -> LiteralArguments:
    return LiteralArguments(syntaxes.gemma_syntax(quote), spellings.gemma(quote))


@dataclass(frozen=True, kw_only=True)
class NamedCallFormat:
    """A block of calls: `opens`, then for each call `before_name`, its name, `after_name`, its
    arguments and `closes_call`, and then `closes`. Texts are as the model writes them.
    """

    opens: str = ""
    """The mark of a block; the same as `before_name` where calls stand in none."""
    begins: str = ""
    """What an answer begins with that is a block, where there is no mark."""
    before_name: str = ""
    name: re.Pattern[str] = NAME
    """The characters of names."""
    after_name: str = ""
    arguments: CallArguments = JSON
    closes_call: str = ""
    between: str | None = None
    """What models write between two calls; None: a block has one."""
    closes: str = ""
    inner: tuple[str, ...] = ()
    """Other marks that stand in calls."""
    listed: bool = False
    """Whether calls stand in brackets."""
    id_mark: str = ""
    """May stand after a name, before an id. `after_name` may then be missing."""
    numbered: bool = False
    """Whether the name stands in an id, `functions.NAME:0`."""
    fenced: bool = False
    """Whether older models write `function`, `after_name`, the name, and a code fence of JSON."""
    passed: tuple[str, ...] = ()
    """What else is let pass around calls."""
    noisy: bool = False
    """Whether text around calls, and `before_name` doubled, is no part of the answer."""
    may_be_json: bool = False
    """Whether calls may be written as JSON objects too."""
    repair_unit: Literal["call", "block"] | None = None
    """How much is read again if there is a slip in the JSON of arguments."""
    repairs: tuple[RepairKind, ...] = ()
    space: str = rf"({SPACE})?"
    """What may stand between the parts of a block in a grammar, as a regular expression."""

    def call_format(self, *blocks: BlockGrammar) -> CallFormat:
        """blocks: other ways to write one."""
        closes_call = self.closes_call if self.repair_unit == "call" or not self.closes else ""
        return CallFormat(
            self.read,
            opens=(self.opens,) if self.opens else (),
            closes=tuple(filter(None, (closes_call, self.closes))) if self.opens else (),
            inner=self.inner,
            begins=(self.begins,) if self.begins else (),
            repair=self._repaired if self.repair_unit else None,
            repairs=self.repairs,
            blocks=(self.block(), *blocks),
        )

    # Reading

    def read(self, source: Source, calls: ToolCallEmitter, name: str = "") -> Steps[None]:
        """A block after its opening mark. name: of its first call, if it was read."""
        begun = bool(name) or (bool(self.opens) and self.opens == self.before_name)
        if not begun and self.may_be_json and (yield from self._json_calls(source, calls)):
            return
        found = 0
        while begun or (yield from self._goes_on(source, empty=not found)):
            if found and self.between is None:
                raise Malformed("more than a call between the marks")
            if self.before_name and not (begun or self.noisy):
                yield from source.expect(self.before_name)
            yield from self._call(source, calls, name)
            begun, name, found = False, "", found + 1
            if self.between is None and not self.closes:
                return

    def _goes_on(self, source: Source, *, empty: bool) -> Steps[bool]:
        """Reads what stands around calls; whether a call comes, rather than the block's end."""
        may_end = not empty or bool(self.passed and self.opens)
        ends = (self.closes,) if self.closes and may_end else ()
        if self.noisy:
            return (yield from self._noise(source, empty=empty))
        found = " "
        while found:
            yield from source.space()
            found = yield from source.accept(*self.passed, *ends)
            if found in ends:
                return False
        return bool((yield from source.peek())) or not may_end

    def _noise(self, source: Source, *, empty: bool) -> Steps[bool]:
        """As `_goes_on`, and reads the mark before a call's name."""
        marks = (self.before_name, self.closes_call, self.closes)
        while True:
            pieces: list[str] = []
            mark = yield from source.up_to(*marks, into=pieces.append)
            if mark == self.before_name:
                return True
            if "".join(pieces).strip() and (empty or mark != self.closes):
                raise Malformed("more than calls in a block")
            if mark != self.closes_call:
                return False

    def _json_calls(self, source: Source, calls: ToolCallEmitter) -> Steps[bool]:
        """Whether there were any, or an array of none."""
        closes = (self.closes,) if self.opens and self.closes else ()
        yield from source.space()
        if listed := self.begins or (yield from source.accept("[")):
            yield from source.space()
        if (yield from source.accept("{")):
            yield from marked_json.objects(source, calls, closes)
        elif listed and not isinstance(self.arguments, LiteralArguments):
            yield from source.expect("]")
        else:
            return False
        return True

    def _call(self, source: Source, calls: ToolCallEmitter, name: str) -> Steps[None]:
        id = None
        if not name:
            name, id = yield from self._head(source, calls)
        if self.numbered and not calls.knows(name):
            raise Malformed(f"there is no tool {name!r}")
        yield from source.space()
        start = partial(calls.start, name, id)
        if self.arguments is JSON and (yield from source.accept(self.closes_call)):
            start().finish()
            return
        call = yield from self.arguments.read(source, start)
        if self.closes_call:
            yield from source.space()
            if self.fenced and (yield from source.accept("```")):
                yield from source.space()
            marked = yield from source.accept(self.closes_call)
            # where there is no other mark, it is the block's, which may be cut off
            at_end = source.stopped() if self.closes else source.at_end()
            if not marked and not (yield from at_end):
                raise Malformed("more than arguments in a call")
        call.finish()

    def _head(self, source: Source, calls: ToolCallEmitter) -> Steps[tuple[str, str | None]]:
        """A name, what follows it, and the call's id."""
        yield from source.space()
        while self.noisy and (yield from source.accept(self.before_name)):
            yield from source.space()
        name = yield from values.run(source, self.name)
        if self.id_mark:
            has_id = yield from source.accept(self.id_mark)
            id = (yield from values.run(source, ID)) if has_id else None
            if has_id and not id:
                raise Malformed("expected an id")
            yield from source.accept(self.after_name)
            return name, id
        yield from source.space()
        yield from source.expect(self.after_name)
        if self.numbered:
            return plain(name), name if plain(name) != name else None
        if self.fenced:
            yield from source.space()
            if not (yield from source.comes("{", self.closes_call)):
                name = yield from values.run(source, self.name)
                yield from source.space()
                yield from source.fence()
        if not calls.knows(name):
            name = name.removesuffix(".call")  # as Llama calls what is built in
        return name, None

    def _repaired(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """The calls of a block whose JSON has slips."""
        if not self.before_name:
            return [self._mended(text)]
        marked = text if self.opens != self.before_name else self.before_name + text
        return [self._mended(part) for part in marked.split(self.before_name)[1:]]

    def _mended(self, part: str) -> tuple[str, dict[str, Any]]:
        head, brace, rest = part.partition("{")
        name, _, later = head.partition(self.after_name)
        if self.fenced and later.strip():
            name = later.strip().partition("\n")[0]
        elif self.id_mark:
            name = name.partition(self.id_mark)[0]
        if self.closes_call and self.repair_unit == "block":
            rest, closed, _ = rest.rpartition(self.closes_call)
            if not closed:
                raise Malformed("a call has no end")
        written = (brace + rest).strip().removesuffix("```" if self.fenced else "")
        return plain(name.strip()) if self.numbered else name.strip(), as_object(loads(written))

    # Writing

    def block(self) -> BlockGrammar:
        closes = "" if self._stands_alone else self.closes or self.closes_call
        parts: dict[str, Any] = {
            "call": self._written,
            "between": None if self._stands_alone else self.between,
            "after": ("]" if self.listed else "", closes),
            "lacks": self.arguments.lacks,
            "space": self.space,
        }
        if not self.opens:
            return UnmarkedBlockGrammar(**parts, head=self._first, rest=self._rest)
        return BlockGrammar(**parts, before="[" if self.listed else "", may_be_empty=self.listed)

    @property
    def _stands_alone(self) -> bool:
        """Whether a call has marks of its own, and stands in no block."""
        return bool(self.closes_call) and self.opens == self.before_name

    def _first(self, tool: Tool) -> str:
        return literally(f"{self.begins}{self.before_name}{self._named(tool)}{self.after_name}")

    def _written(self, lark: Lark, tool: Tool) -> str:
        is_read = not self.before_name or self.before_name == self.opens
        before = "" if is_read else f"{lark.text(self.before_name)} "
        return f"{before}{self._headed(lark, tool)}"

    def _headed(self, lark: Lark, tool: Tool) -> str:
        """A call after `before_name`."""
        name, after = quoted(self._named(tool)), lark.text(self.after_name)
        rest = self._rest(lark, tool)
        if self.fenced:
            made = self.arguments.write(lark, tool)
            older = f'"function" {after} {name} "\\n```json\\n" {made} "\\n```"'
            return f'({name} {after} {made} | {older}) {lark.text(self.closes_call)} "\\n"?'
        if self.numbered:
            number = lark.terminal("/[0-9]{1,4}/")
            return f"{quoted(f'functions.{tool.name}:')} {number} {after} {rest}"
        if self.id_mark:
            id = lark.terminal("/[a-zA-Z0-9]{9}/")
            return f"{name} ({lark.text(self.id_mark)} {id})? ({after})? {rest}"
        return f"{name} {after} {rest}"

    def _rest(self, lark: Lark, tool: Tool) -> str:
        """A call after `after_name`."""
        closes = lark.text(self.closes_call) if self.closes_call and self.closes else ""
        return f"{self.arguments.write(lark, tool)} {closes}".strip()

    def _named(self, tool: Tool) -> str:
        if not self.name.fullmatch(tool.name) or tool.name != tool.name.strip():
            raise UncallableTool(f"the name of the tool {tool.name!r}")
        return tool.name


def plain(id: str) -> str:
    """The name in an id."""
    name, _, number = id.rpartition(":")
    return name if number.isdecimal() else id
