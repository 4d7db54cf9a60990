"""Calls that begin with the tool's name: one record, one reader, one writer of grammars."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, Protocol

from mlx_server.events import RepairKind
from mlx_server.grammars import formats as answer_formats
from mlx_server.grammars.arguments import MemberSchema, arguments_of, unsupported_one_by_one
from mlx_server.grammars.grammar import SPACE, UnsupportedKeyword
from mlx_server.grammars.lark import Lark, literally, quoted
from mlx_server.messages import Tool
from mlx_server.tool_parsers import json_calls, value_rules, values
from mlx_server.tool_parsers.call_format import (
    BlockGrammar,
    CallFormat,
    UncallableTool,
    UnmarkedBlockGrammar,
    comma_separated_rule,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter, ToolCallWriter
from mlx_server.tool_parsers.json_calls import as_object, read_json_arguments, repaired
from mlx_server.tool_parsers.model_json import Malformed, loads
from mlx_server.tool_parsers.source import Lookahead, Source, Steps
from mlx_server.tool_parsers.value_rules import LiteralGrammar, LiteralSyntax
from mlx_server.tool_parsers.values import Syntax, json_size


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
        yield from source.expect_spaced("{")
        return (yield from read_json_arguments(source, start, ends))

    def write(self, lark: Lark, tool: Tool) -> str:
        return answer_formats.arguments(tool.parameters, lark, strict=tool.strict)

    def unsupported(self, tool: Tool) -> Sequence[UnsupportedKeyword]:
        return ()


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
            yield from source.expect_spaced("}")
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
        return unsupported_one_by_one(tool)


JSON = JsonArguments()
PYTHON = LiteralArguments(values.python_syntax(), value_rules.PYTHON)


def python_arguments(*ends: str, bare_text: bool = False) -> LiteralArguments:
    """ends: the delimiters that may follow the calls, empty if there are none. bare_text: whether a
    word without quotes is text, rather than a variable."""
    syntax = values.python_syntax(*filter(None, ends), bare_text=bare_text)
    return LiteralArguments(syntax, value_rules.PYTHON)


def gemma_arguments(quote: str, opening: str = "{", *ends: str) -> LiteralArguments:
    """ends: the delimiters that may follow the calls."""
    return LiteralArguments(values.gemma_syntax(quote, opening, *ends), value_rules.gemma(quote))


ID = re.compile(r"[a-zA-Z0-9]+")
CLIENT_ID = re.compile(r"[\w.:\-]+")
"""Matches an id in the form of a client's, which the model has seen in earlier calls."""
NAME = re.compile(r"[\w.\-]+")
REWRITTEN_ID = re.compile(r"(?:functions_)?(.+?)(?:_[0-9]+)?")
"""Matches an id of Kimi's in which a client or gateway has replaced all but letters, digits and
underscores."""

JSON_CALLS = re.compile(r"\s*(\[\s*)?\{")
"""Matches the beginning of calls that are JSON objects."""

NO_NAME = ("", "functions", "functions.")
"""The names in ids that have nothing else but a number."""


def _check_quotes(source: Source, ends: tuple[str, ...]) -> Steps[None]:
    """Raises Malformed if a quote follows a call that nothing closes and that ends an answer: the
    string may have ended at a quote that was not escaped."""
    ahead = source.lookahead()
    if '"' in (yield from ahead.text_up_to(*ends)):
        raise Malformed("a quote in a string was not escaped")


@dataclass(frozen=True, kw_only=True)
class NamedCallFormat:
    """A block of calls: `opens`, then for each call `before_name`, its name, `after_name`, its
    arguments and `closes_call`, and then `closes`. Texts are as the model writes them.

    A format in which a call has an id, or a slip that no other models make, is a subclass.
    """

    opens: str = ""
    """The delimiter of a block; the same as `before_name` if calls stand in no block."""
    begins: str = ""
    """The beginning of an answer that is a block, in a format without an opening delimiter."""
    before_name: str = ""
    name: re.Pattern[str] = NAME
    """Matches names."""
    after_name: str = ""
    arguments: CallArguments = JSON
    closes_call: str = ""
    between: str | None = None
    """The text between two calls; None: a block has one call."""
    closes: str = ""
    inner: tuple[str, ...] = ()
    """Other delimiters that stand in calls."""
    around: tuple[str, str] = ("", "")
    """Texts before and after the calls of a block that a grammar writes; `passed` has them too."""
    before_arguments: str = ""
    """The text that some models write in front of the arguments, and others don't."""
    passed: tuple[str, ...] = ()
    """Other texts that are passed over around calls."""
    follows: tuple[str, ...] = ()
    """Delimiters of other parts of an answer, which may come right after a call."""
    may_be_json: bool = False
    """Whether models are taught to write calls as JSON objects too. Between delimiters such an
    object is read in any case, and reported."""
    repair_unit: Literal["call", "block"] | None = None
    """The part that is read again if there is a mistake in the JSON of arguments."""
    repairs: tuple[RepairKind, ...] = ()
    ends_answer: bool = False
    """Whether models write nothing but calls after a block."""
    space: str = rf"({SPACE})?"
    """A regular expression of what may stand between the parts of a block in a grammar."""

    def call_format(self, *blocks: BlockGrammar) -> CallFormat:
        """Returns the format. blocks: further grammars, for other ways to write a call."""
        closes_call = self.closes_call if self.repair_unit == "call" or not self.closes else ""
        return CallFormat(
            self.read,
            opens=(self.opens,) if self.opens else (),
            closes=tuple(filter(None, (closes_call, self.closes))) if self.opens else (),
            inner=self.inner,
            begins=(self.begins,) if self.begins else (),
            repair=self._repaired if self.repair_unit else None,
            repairs=self.repairs,
            ends_answer=self.ends_answer,
            blocks=(self.block(), *blocks),
        )

    # Reading

    def read(self, source: Source, calls: ToolCallEmitter, name: str = "") -> Steps[None]:
        """Reads a block after its opening delimiter. name: the first call's, if it was read."""
        begun = bool(name) or (bool(self.opens) and self.opens == self.before_name)
        # a brace before the name would be taken for the object's
        has_brace = self.before_name.startswith("{")
        may_be_json = not (name or has_brace) and (self.may_be_json or bool(self.opens))
        if may_be_json and (yield from self._read_json_calls(source, calls)):
            return
        count, is_closed = 0, False
        while begun or (yield from self._read_between_calls(source, empty=not count)):
            is_sure = not count or self.between is not None
            if not begun:
                is_sure = (yield from self._read_before_name(source)) and is_sure
                marked = may_be_json and self.before_name in self.inner
                if marked and (yield from self._read_json_calls(source, calls)):
                    count += 1
                    continue
            is_closed = yield from self._read_call(source, calls, name, is_sure=is_sure)
            begun, name, count = False, "", count + 1
            if self.between is None and not self.closes and is_closed:
                return

    def _read_before_name(self, source: Source) -> Steps[bool]:
        """Reads the text before a name, which may be missing if it is plain text. Returns whether
        it was there."""
        if self.before_name in self.inner:
            return bool((yield from source.expect(self.before_name)))
        return not self.before_name or bool((yield from source.accept(self.before_name)))

    def _read_between_calls(self, source: Source, *, empty: bool) -> Steps[bool]:
        """Reads the text around calls. Returns whether a call comes, rather than the block's
        end."""
        may_end = not empty or bool(self.passed and self.opens)
        ends = (self.closes,) if self.closes and may_end else ()
        literal = " "
        while literal:
            literal = yield from source.accept_spaced(*self.passed, *ends)
            if literal in ends:
                return False
        return bool((yield from source.peek())) or not may_end

    def _read_json_calls(self, source: Source, calls: ToolCallEmitter) -> Steps[bool]:
        """Reads calls in JSON. Returns whether there were any, or an empty array."""
        closes = tuple(filter(None, (self.closes_call, self.closes))) if self.opens else ()
        yield from source.space()
        if listed := self.begins or (self.may_be_json and (yield from source.accept("["))):
            yield from source.space()
        if (yield from source.accept("{")):
            if not self.may_be_json:
                calls.misplaced += ("format",)
            yield from json_calls.read_call_objects(source, calls, closes)
        elif listed and not isinstance(self.arguments, LiteralArguments):
            yield from source.expect("]")
        else:
            return False
        return True

    def _read_call(
        self, source: Source, calls: ToolCallEmitter, name: str, *, is_sure: bool
    ) -> Steps[bool]:
        """Reads a call. Returns whether it was closed. is_sure: whether it certainly is a call."""
        head = CallHead(name, None, self.arguments)
        if not name:
            yield from source.space()
            head = yield from self._read_head(source, calls)
        if not is_sure:
            calls.check_name(head.name)

        def start() -> ToolCallWriter:
            call = calls.start(head.name, head.id)
            if not is_sure or head.arguments is not self.arguments:
                call.repaired("format")
            if head.is_guessed:
                call.add_repair("name", ".function.name")
            return call

        yield from source.space()
        if self.before_arguments:
            yield from source.accept(self.before_arguments)
            yield from source.space()
        if self.arguments is JSON and (yield from source.accept(self.closes_call)):
            start().finish()
            return True
        delimiters = (self.closes_call, self.closes, self.opens, self.before_name, *self.follows)
        ends = tuple(filter(None, delimiters))
        call = (yield from head.arguments.read(source, start, ends)) if head.arguments else start()
        if self.ends_answer and not self.closes_call:
            yield from _check_quotes(source, ends)
        is_closed = not self.closes_call or (yield from self._read_end(source, call, ends))
        call.finish()
        return is_closed

    def _read_end(self, source: Source, call: ToolCallWriter, ends: tuple[str, ...]) -> Steps[bool]:
        """Reads the delimiter after a call. It may be missing at the end of the turn and before
        another delimiter. Returns whether there was one."""
        if (yield from source.accept_spaced(self.closes_call)):
            return True
        if (yield from source.peek()):
            ahead = source.lookahead()
            while (yield from ahead.accept(*self.passed)):
                yield from ahead.space()
            if (yield from ahead.peek()) and not (yield from self._ends_call(ahead, call, ends)):
                raise Malformed("more than arguments in a call")
            call.repaired("format")
        return False

    def _ends_call(
        self, ahead: Lookahead, call: ToolCallWriter, ends: tuple[str, ...]
    ) -> Steps[bool]:
        """Whether what follows a call that has no closing delimiter shows that it has ended."""
        end = yield from ahead.accept(*ends)
        if end != self.before_name or end in (self.opens, *self.inner):
            return bool(end)
        yield from ahead.space()  # plain text, which a string with quotes in it may have too
        name = yield from ahead.run(self.name)
        return call.knows(name) or not (yield from ahead.peek())

    def _read_head(self, source: Source, calls: ToolCallEmitter) -> Steps["CallHead"]:
        """Reads a name, and what precedes the arguments."""
        name = (yield from source.run(self.name)).strip()
        yield from source.space()
        arguments = yield from self._read_after_name(source)
        if not calls.knows(name):
            name = name.removesuffix(".call")  # Llama's name of a built-in tool's call
        return CallHead(name, None, arguments)

    def _read_after_name(self, source: Source) -> Steps[CallArguments]:
        """Reads the text after a name. Returns the format of the arguments after it."""
        if self.after_name:
            yield from source.expect(self.after_name)
        return self.arguments

    def _repaired(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """Returns the calls of a block whose JSON has mistakes."""
        if self.may_be_json and JSON_CALLS.match(text):
            return repaired(text)
        if isinstance(self.arguments, LiteralArguments):
            raise Malformed("the arguments are not JSON")
        if not self.before_name:
            return [self._repaired_call(text)]
        marked = text if self.opens != self.before_name else self.before_name + text
        return [self._repaired_call(part) for part in marked.split(self.before_name)[1:]]

    def _repaired_call(self, part: str) -> tuple[str, dict[str, Any]]:
        head, brace, rest = part.partition("{")
        if self.closes_call and self.repair_unit == "block":
            rest, closed, _ = rest.rpartition(self.closes_call)
            if not closed:
                raise Malformed("a call has no end")
        return self._name_in(head), as_object(loads(self._json_in(brace + rest)))

    def _name_in(self, head: str) -> str:
        """Returns the name in what precedes the arguments."""
        return head.partition(self.after_name)[0].strip()

    def _json_in(self, written: str) -> str:
        return written.strip()

    # Writing

    def block(self) -> BlockGrammar:
        closes = "" if self._stands_alone else self.closes or self.closes_call
        parts: dict[str, Any] = {
            "call": self._written,
            "between": None if self._stands_alone else self.between,
            "after": (self.around[1], closes),
            "unsupported": self.arguments.unsupported,
            "space": self.space,
        }
        if not self.opens:
            return UnmarkedBlockGrammar(
                **parts,
                head=self._beginning_of,
                rest=self._rest,
                begins_with_name=not (self.begins or self.before_name),
            )
        is_list = self.around[0] == "["
        return BlockGrammar(**parts, before=self.around[0], may_be_empty=is_list)

    @property
    def _stands_alone(self) -> bool:
        """Whether a call has delimiters of its own, and stands in no block."""
        return bool(self.closes_call) and self.opens == self.before_name

    def _beginning_of(self, tool: Tool) -> str:
        return literally(f"{self.begins}{self.before_name}{self._named(tool)}{self.after_name}")

    def _written(self, lark: Lark, tool: Tool) -> str:
        is_read = not self.before_name or self.before_name == self.opens
        before = "" if is_read else f"{lark.text(self.before_name)} "
        return f"{before}{self._headed(lark, tool)}"

    def _headed(self, lark: Lark, tool: Tool) -> str:
        """Returns a call after `before_name`."""
        name, after = quoted(self._named(tool)), self._after(lark)
        return f"{self._with_id(name, lark)} {after} {self._rest(lark, tool)}"

    def _with_id(self, name: str, lark: Lark) -> str:
        """Returns the name, as symbols of a rule, with the id next to it."""
        return name

    def _after(self, lark: Lark) -> str:
        return lark.text(self.after_name + self.before_arguments)

    def _rest(self, lark: Lark, tool: Tool) -> str:
        """Returns a call after `after_name`."""
        own = self.closes or self._stands_alone
        closes = lark.text(self.closes_call) if self.closes_call and own else ""
        return f"{self.arguments.write(lark, tool)} {closes}".strip()

    def _named(self, tool: Tool) -> str:
        if not self.name.fullmatch(tool.name) or tool.name != tool.name.strip():
            raise UncallableTool(f"the name of the tool {tool.name!r}")
        return tool.name


@dataclass(frozen=True)
class CallHead:
    """What precedes the arguments of a call."""

    name: str
    id: str | None
    arguments: CallArguments | None
    """The format of the arguments that follow; None if the model left them out."""
    is_guessed: bool = False
    """Whether the name was not written: only one tool takes such arguments."""


@dataclass(frozen=True, kw_only=True)
class KimiCallFormat(NamedCallFormat):
    """Calls whose name stands in an id, `functions.NAME:0`. Text around calls, and `before_name`
    doubled, is no part of the answer."""

    def _read_before_name(self, source: Source) -> Steps[bool]:
        yield from ()  # `_read_between_calls` has read it
        return True

    def _read_between_calls(self, source: Source, *, empty: bool) -> Steps[bool]:
        delimiters = (self.before_name, self.closes_call, self.closes)
        while True:
            text, delimiter = yield from source.text_up_to(*delimiters)
            if delimiter == self.before_name:
                return True
            if text.strip() and (empty or delimiter != self.closes):
                raise Malformed("more than calls in a block")
            if delimiter != self.closes_call:
                return False

    def _read_head(self, source: Source, calls: ToolCallEmitter) -> Steps[CallHead]:
        while (yield from source.accept(self.before_name)):
            yield from source.space()
        written = (yield from source.run(self.name)).strip()
        yield from source.expect_spaced(self.after_name)
        name = name_in_id(written, calls.knows)
        head = CallHead(name, None if name == written else written, self.arguments)
        if name in NO_NAME and calls.allowed.mistakes:
            yield from source.space()
            size = yield from json_size(source)
            text = source.ahead()[:size]
            if not text and source.cut and self.closes_call not in source.ahead():
                source.take(len(source.ahead()))  # of a call that was cut off, nothing is shown
            call = calls.nameless(text)
            head = CallHead(call.name if call else "", None, self.arguments, is_guessed=True)
        calls.check_name(head.name)
        return head

    def _name_in(self, head: str) -> str:
        return name_in_id(super()._name_in(head))

    def _headed(self, lark: Lark, tool: Tool) -> str:
        self._named(tool)
        number = lark.terminal("/[0-9]{1,4}/")
        name = quoted(f"functions.{tool.name}:")
        return f"{name} {number} {self._after(lark)} {self._rest(lark, tool)}"


@dataclass(frozen=True, kw_only=True)
class DeepSeekCallFormat(NamedCallFormat):
    """Calls for which older models write `function`, `after_name`, the name, and a code fence of
    JSON."""

    def _read_head(self, source: Source, calls: ToolCallEmitter) -> Steps[CallHead]:
        head = yield from super()._read_head(source, calls)
        yield from source.space()
        if (yield from source.comes("{", self.closes_call)):
            return head
        name = (yield from source.run(self.name)).strip()
        yield from source.space()
        yield from source.fence()
        return CallHead(name, None, head.arguments)

    def _read_end(self, source: Source, call: ToolCallWriter, ends: tuple[str, ...]) -> Steps[bool]:
        yield from source.accept_spaced("```")
        return (yield from super()._read_end(source, call, ends))

    def _name_in(self, head: str) -> str:
        name, _, later = head.partition(self.after_name)
        return (later.strip().partition("\n")[0] or name).strip()

    def _json_in(self, written: str) -> str:
        return written.strip().removesuffix("```")

    def _headed(self, lark: Lark, tool: Tool) -> str:
        name, after = quoted(self._named(tool)), self._after(lark)
        arguments = self.arguments.write(lark, tool)
        older = f'"function" {after} {name} "\\n```json\\n" {arguments} "\\n```"'
        return f'({name} {after} {arguments} | {older}) {lark.text(self.closes_call)} "\\n"?'


@dataclass(frozen=True, kw_only=True)
class IdFirstCallFormat(NamedCallFormat):
    """Calls with an id before the name, and `id_delimiter` between them."""

    id_delimiter: str

    def _read_head(self, source: Source, calls: ToolCallEmitter) -> Steps[CallHead]:
        id = (yield from source.run(CLIENT_ID)).strip()
        yield from source.expect(self.id_delimiter)
        name = (yield from source.run(self.name)).strip()
        yield from source.expect(self.after_name)
        return CallHead(name, id or None, self.arguments)

    def _name_in(self, head: str) -> str:
        return super()._name_in(head.partition(self.id_delimiter)[2])

    def _with_id(self, name: str, lark: Lark) -> str:
        id = lark.terminal(r"/[a-zA-Z0-9_.:\-]{1,40}/")
        return f"({id})? {lark.text(self.id_delimiter)} {name}"


@dataclass(frozen=True, kw_only=True)
class IdLastCallFormat(NamedCallFormat):
    """Calls with `id_delimiter` and an id after the name, or without. `after_name` may be missing
    too, and so may the arguments after it at the end."""

    id_delimiter: str

    def _read_head(self, source: Source, calls: ToolCallEmitter) -> Steps[CallHead]:
        name = (yield from source.run(self.name)).strip()
        yield from source.space()
        id = None
        if (yield from source.accept(self.id_delimiter)):
            yield from source.space()
            id = (yield from source.run(ID)).strip()
            if not id:
                raise Malformed("expected an id")
            yield from source.space()
        marked = yield from source.accept(self.after_name)
        has_none = marked and (
            (yield from source.after_space(self.opens)) or (yield from source.stopped())
        )
        return CallHead(name, id, None if has_none else self.arguments)

    def _name_in(self, head: str) -> str:
        return super()._name_in(head).partition(self.id_delimiter)[0].strip()

    def _headed(self, lark: Lark, tool: Tool) -> str:
        name, id = quoted(self._named(tool)), lark.terminal("/[a-zA-Z0-9]{9}/")
        with_id = f"{name} ({lark.text(self.id_delimiter)} {id})?"
        return f"{with_id} ({self._after(lark)})? {self._rest(lark, tool)}"


@dataclass(frozen=True, kw_only=True)
class GemmaCallFormat(NamedCallFormat):
    """Calls for which models also write parentheses in place of `after_name`."""

    in_parentheses: CallArguments

    def _read_after_name(self, source: Source) -> Steps[CallArguments]:
        opening = yield from source.expect(self.after_name, "(")
        return self.arguments if opening == self.after_name else self.in_parentheses


def name_in_id(id: str, knows: Callable[[str], bool] = lambda name: True) -> str:
    """Returns the name in an id, also in one that a client or a gateway has rewritten."""
    name, _, number = id.rpartition(":")
    name = name if number.isdecimal() else id
    match = REWRITTEN_ID.fullmatch(id)
    return match[1] if match and not knows(name) and knows(match[1]) else name


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
    form = _GLM4.call_format()
    return tuple(
        each
        for tool in tools
        for each in (
            _with_slips(tool.name),
            replace(form, read=partial(_GLM4.read, name=tool.name), begins=(f"{tool.name}\n",)),
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
    yield from source.expect_spaced("{")
    if not (yield from source.after_space('"', "'", "}")):
        raise Malformed("expected a key")  # a text may show a bracket after a name
    follows = (FENCE, *_FUNCTIONARY.follows)
    call = yield from read_json_arguments(source, lambda: calls.start(name), follows)
    if (yield from source.after_space(FENCE)):
        yield from source.expect_spaced(FENCE)
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
