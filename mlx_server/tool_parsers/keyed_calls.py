"""Calls whose arguments are pairs of a key and a value, each between delimiters of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.repair.model_json import Malformed
from mlx_server.schemas.unsupported_arguments import unsupported_as_text
from mlx_server.schemas.values import MemberSchema, ValueSchema, arguments_of
from mlx_server.tool_parsers import marked_json
from mlx_server.tool_parsers.bare_text import bare_value_rule
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat
from mlx_server.tool_parsers.call_writer import ToolCallWriter
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_ahead import read_json
from mlx_server.tool_parsers.parameters import UncallableTool, one_by_one_rule
from mlx_server.tool_parsers.source import Source, Steps

TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}


@dataclass(frozen=True, kw_only=True)
class KeyedCallFormat:
    """A block of calls: `opens`, then for each call `before_name`, its name, `after_name`, pairs,
    and `closes_call`, and then `closes`. Without `opens`, each call stands alone.
    """

    opens: str = ""
    before_name: str
    after_name: str = ""
    key_opens: str
    key_closes: str
    type_opens: str = ""
    """The text between key and value where a pair has a third part, the value's type."""
    type_closes: str = ""
    value_opens: str = ""
    """The text before a value. Empty if the value begins right after `key_closes`; then no value
    has a type."""
    value_closes: str
    closes_call: str
    closes: str = ""
    space: str = r"\n?"

    def call_format(self) -> CallFormat:
        parts = (
            self.before_name,
            self.after_name,
            self.key_opens,
            self.key_closes,
            self.type_opens,
            self.type_closes,
            self.value_opens,
            self.value_closes,
            self.closes_call,
        )
        block = BlockGrammar(
            self._written,
            between="" if self.opens else None,
            after=self.closes,
            unsupported=unsupported_as_text,
            space=self.space,
        )
        return CallFormat(
            self._read_block,
            opens=(self.opens or self.before_name,),
            closes=(self.closes or self.closes_call,),
            inner=tuple(filter(None, parts)),
            blocks=(block,),
        )

    # Reading

    def _read_block(self, source: Source, calls: ToolCallEmitter) -> Steps[None]:
        if not self.opens:
            yield from self._read_call(source, calls)
            return
        yield from source.space()
        found = yield from source.expect(self.before_name)
        while found == self.before_name:
            yield from self._read_call(source, calls)
            yield from source.space()
            found = yield from source.accept(self.before_name, self.closes)
        if not found and (yield from source.peek()):
            raise Malformed("more than calls in a block")

    def _read_call(self, source: Source, calls: ToolCallEmitter) -> Steps[None]:
        yield from source.space()
        if bracket := (yield from source.accept("{", "[")):
            json = marked_json.objects if bracket == "{" else marked_json.array
            yield from json(source, calls, (self.closes_call,))
            return
        call, delimiter = yield from self._read_name(source, calls)
        while delimiter == self.key_opens:
            yield from self._read_pair(source, call)
            yield from source.space()
            delimiter = yield from source.accept(self.key_opens, self.closes_call)
        if not delimiter and not (yield from source.stopped()):
            raise Malformed("a call has no end")
        call.finish()

    def _read_name(
        self, source: Source, calls: ToolCallEmitter
    ) -> Steps[tuple[ToolCallWriter, str]]:
        """Returns the writer of the call whose name comes next, and the delimiter after the
        name."""
        pieces: list[str] = []
        ends = (*filter(None, (self.after_name,)), self.key_opens, self.closes_call, "\n")
        delimiter = yield from source.up_to(*ends, into=pieces.append)
        name = "".join(pieces).strip()
        calls.check_name(name)
        if delimiter in (self.after_name, "\n"):
            yield from source.space()
            delimiter = yield from source.accept(self.key_opens, self.closes_call)
        if not (delimiter or (yield from source.stopped())):
            raise Malformed("expected a key")
        return calls.start(name), delimiter

    def _read_pair(self, source: Source, call: ToolCallWriter) -> Steps[None]:
        pieces: list[str] = []
        if not (yield from source.up_to(self.key_closes, into=pieces.append)):
            raise Malformed("a key has no end")
        key = "".join(pieces).strip()
        if self.value_opens:  # without it, white space is a part of the value
            yield from self._read_value_opening(source)
        if call.streams(key):
            yield from self._read_value(source, partial(call.text, key))
            call.end_text(key)
        else:
            pieces = [(yield from read_json(source))]
            yield from self._read_value(source, pieces.append)
            call.untyped(key, "".join(pieces))

    def _read_value_opening(self, source: Source) -> Steps[None]:
        """Reads the type of a value, if it has one, and the delimiter before the value."""
        yield from source.space()
        if self.type_opens and (yield from source.accept(self.type_opens)):
            yield from source.up_to(self.type_closes, into=lambda _: None)
            yield from source.space()
        yield from source.expect(self.value_opens)

    def _read_value(self, source: Source, into: Callable[[str], None]) -> Steps[None]:
        """Reads a value up to the closing delimiter that is followed by markup."""
        following = (self.key_opens, self.closes_call)
        while (yield from source.up_to(self.value_closes, into=into)):
            if (yield from source.after_space(*following)) or (yield from source.stopped()):
                return
            into(self.value_closes)
        raise Malformed("a value has no end")

    # Writing

    def _written(self, lark: Lark, tool: Tool) -> str:
        name = tool.name
        if not name or name != name.strip() or set(name) & set("<\n{"):
            raise UncallableTool(f"the name of the tool {name!r}")
        space = lark.terminal(r"/\n/") + "?"

        def written(member: MemberSchema) -> str | None:
            key = member.key
            if key != key.strip() or "\n" in key or self.key_closes in key:
                return None
            head = f"{lark.text(self.key_opens)} {quoted(key)} {lark.text(self.key_closes)}"
            typed = self._typed(member.value, lark, space) if self.type_opens else ""
            opening = f"{space} {typed} {lark.text(self.value_opens)}" if self.value_opens else ""
            value = bare_value_rule(member.value, lark, self.value_closes, self.closes_call)
            return f"{head} {opening} {value} {space}"

        arguments = one_by_one_rule(arguments_of(tool), written, lark)
        before = f"{lark.text(self.before_name)} " if self.opens else ""
        after = lark.text(self.after_name) if self.after_name else ""
        return lark.rule(
            f"{before}{quoted(name)} {after} {space} {arguments} {lark.text(self.closes_call)}"
        )

    def _typed(self, value: ValueSchema, lark: Lark, space: str) -> str:
        types = " | ".join(quoted(type) for type in sorted(value.types & TYPES)) or '"string"'
        return f"{lark.text(self.type_opens)} ({types}) {lark.text(self.type_closes)} {space}"
