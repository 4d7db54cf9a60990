"""Calls whose arguments are pairs of a key and a value, each between delimiters of its own."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mlx_server.grammars.arguments import (
    MemberSchema,
    ValueSchema,
    arguments_of,
    unsupported_as_text,
)
from mlx_server.grammars.grammar import UnsupportedKeyword
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.tool_parsers import json_calls
from mlx_server.tool_parsers.call_format import (
    BlockGrammar,
    CallFormat,
    UncallableTool,
    one_by_one_rule,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter, ToolCallWriter
from mlx_server.tool_parsers.model_json import Malformed, UnknownTool
from mlx_server.tool_parsers.named_calls import NamedCallFormat
from mlx_server.tool_parsers.source import Into, Lookahead, Source, Steps, discard
from mlx_server.tool_parsers.value_rules import bare_value_rule
from mlx_server.tool_parsers.values import read_json

TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}


@dataclass(frozen=True, kw_only=True)
class PairArguments:
    """Arguments as pairs, whose keys and values have delimiters of their own."""

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
    """The delimiter after the arguments."""

    def read(
        self, source: Source, start: Callable[[], ToolCallWriter], ends: tuple[str, ...]
    ) -> Steps[ToolCallWriter]:
        following = (self.key_opens, *ends)
        if not ((yield from source.after_space(*following)) or (yield from source.stopped())):
            yield from source.accept_spaced(*following)  # which takes one that was cut off
            raise Malformed("expected a key")
        call = start()
        yield from source.space()
        while (yield from source.accept(self.key_opens)):
            yield from self._read_pair(source, call, following)
            yield from source.space()
        if not ((yield from source.comes(*ends)) or (yield from source.stopped())):
            raise Malformed("a call has no end")
        return call

    def _read_pair(
        self, source: Source, call: ToolCallWriter, following: tuple[str, ...]
    ) -> Steps[None]:
        key, closing = yield from source.text_up_to(self.key_closes)
        if not closing:
            raise Malformed("a key has no end")
        key = key.strip()
        if self.value_opens:  # without it, white space is a part of the value
            yield from source.space()
            if self.type_opens and (yield from source.accept(self.type_opens)):
                yield from source.up_to(self.type_closes, into=discard)
                yield from source.space()
            yield from source.expect(self.value_opens)
        if call.streams(key):
            yield from self._read_value(source, partial(call.text, key), following)
            call.end_text(key)
        else:
            pieces = [(yield from read_json(source))]
            yield from self._read_value(source, pieces.append, following)
            call.untyped(key, "".join(pieces))

    def _read_value(self, source: Source, into: Into, following: tuple[str, ...]) -> Steps[None]:
        """Reads a value up to the closing delimiter that is followed by markup."""
        while (yield from source.up_to(self.value_closes, into=into)):
            if (yield from source.after_space(*following)) or (yield from source.stopped()):
                return
            into(self.value_closes)
        raise Malformed("a value has no end")

    def write(self, lark: Lark, tool: Tool) -> str:
        space = lark.terminal(r"/\n/") + "?"

        def written(member: MemberSchema) -> str | None:
            key = member.key
            if key != key.strip() or "\n" in key or self.key_closes in key:
                return None
            head = f"{lark.text(self.key_opens)} {quoted(key)} {lark.text(self.key_closes)}"
            typed = self._typed(member.value, lark, space) if self.type_opens else ""
            opening = f"{space} {typed} {lark.text(self.value_opens)}" if self.value_opens else ""
            others = self.closes_call, self.key_closes
            value = bare_value_rule(member.value, lark, self.value_closes, *others)
            return f"{head} {opening} {value} {space}"

        return f"{space} {one_by_one_rule(arguments_of(tool), written, lark)}"

    def _typed(self, value: ValueSchema, lark: Lark, space: str) -> str:
        types = " | ".join(quoted(type) for type in sorted(value.types & TYPES)) or '"string"'
        return f"{lark.text(self.type_opens)} ({types}) {lark.text(self.type_closes)} {space}"

    def unsupported(self, tool: Tool) -> Sequence[UnsupportedKeyword]:
        return unsupported_as_text(tool)


def keyed_calls(
    *,
    opens: str = "",
    before_name: str,
    after_name: str = "",
    closes_call: str,
    closes: str = "",
    **delimiters: str,
) -> NamedCallFormat:
    """Returns the format of calls with pairs as arguments. opens: empty if each call stands alone.
    delimiters: those of the pairs."""
    pairs = PairArguments(closes_call=closes_call, **delimiters)
    stops = {part[0] for part in (after_name, pairs.key_opens, closes_call) if part}
    return NamedCallFormat(
        opens=opens or before_name,
        before_name=before_name,
        name=re.compile(rf"[^{{\n{''.join(map(re.escape, sorted(stops)))}]+"),
        after_name=after_name,
        arguments=pairs,
        closes_call=closes_call,
        between="" if opens else None,
        closes=closes,
        inner=tuple(filter(None, (before_name, after_name, *vars(pairs).values()))),
        space=r"\n?",
    )


# GLM-4.5 and later: `<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>`
# for each argument, on lines of their own or not. GLM is known to stutter: it begins a call twice.
# It has a reader of its own, and is no `NamedCallFormat`: half of this reader is for GLM's slips (a
# call begun twice, a name joined to the first key, line breaks as escapes, assignments, examples of
# calls within a value, a missing delimiter), which would be eight options that no other record
# sets.

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
IN_VALUES = (VALUE_END, CLOSE, KEY_END, KEY, OPEN, f"\n{KEY}", f"\n{CLOSE}")
"""Delimiters that may mean something inside of a value, with the line break before them."""
NAME = re.compile(r"[^<{\n]+")
ESCAPED_LINE = "\\n"
"""A line break that was written as in a JSON string."""
AFTER_VALUE = (KEY, CLOSE, ESCAPED_LINE + KEY, ESCAPED_LINE + CLOSE)
ASSIGNMENT = re.compile(r"""\b(\w+)=("[^"\\]*"|'[^'\\]*'|[^\s"'=,]+)(?:,? +|$)""")


def _read_block(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    if (yield from source.accept_spaced("{")):
        calls.misplaced += ("format",)
        yield from json_calls.read_call_objects(source, calls, (CLOSE,))
        return
    is_over = yield from _read_call(source, calls)
    while not is_over and (yield from source.peek()):
        is_over = yield from _read_call(source, calls, is_another=True)


def _read_call(source: Source, calls: ToolCallEmitter, *, is_another: bool = False) -> Steps[bool]:
    """Reads a call; returns whether its block is over. is_another: whether it is not the block's
    first."""
    name, delimiter, key = yield from _read_name(source, calls)
    if delimiter == CLOSE and (assigned := _assigned(name, calls)):
        _write_assigned(*assigned, calls)
        return True
    call = calls.start(name)
    if is_another or key or delimiter == "{":
        call.repaired("format")
    while delimiter == KEY:
        delimiter = yield from _read_argument(source, call, key)
        key = ""
    if delimiter == "{":
        yield from json_calls.read_json_arguments(source, lambda: call, (CLOSE,))
        delimiter = yield from source.accept_spaced(CLOSE)
    call.finish()
    return delimiter == CLOSE


def _read_name(source: Source, calls: ToolCallEmitter) -> Steps[tuple[str, str, str]]:
    """Reads a name and the delimiter after it, and the first key if no delimiter precedes it."""
    while True:
        yield from source.space()
        name = yield from source.run(NAME)
        if name.endswith(ESCAPED_LINE) and calls.knows(name.removesuffix(ESCAPED_LINE)):
            name = name.removesuffix(ESCAPED_LINE)
            calls.misplaced += ("format",)
        if _assigned(name, calls):
            yield from source.space()
            return name, (yield from source.expect(CLOSE)), ""
        if name and not calls.knows(name):
            tool, key = calls.tool_and_key(name)
            if not (tool and (yield from source.comes(KEY_END))):
                raise UnknownTool(name)
            return tool, KEY, key
        delimiter = yield from source.accept_spaced(KEY, CLOSE, "{")
        if delimiter or (yield from source.stopped()):
            return name, delimiter, ""
        yield from source.expect(OPEN)  # the call begins again


def _assigned(text: str, calls: ToolCallEmitter) -> tuple[str, dict[str, str]] | None:
    """Finds a tool and its arguments in a text that is `name key=value key=value` and nothing
    else."""
    name, space, rest = text.strip().partition(" ")
    if not space or calls.knows(text.strip()) or not calls.knows(name):
        return None
    if ASSIGNMENT.sub("", rest.strip()):  # there is something between them
        return None
    pairs = ASSIGNMENT.findall(rest)
    keys = [key for key, _ in pairs]
    is_sure = len(keys) == len({*keys}) and calls.parameters(name).issuperset(keys)
    return (name, dict(pairs)) if is_sure else None


def _write_assigned(name: str, arguments: dict[str, str], calls: ToolCallEmitter) -> None:
    call = calls.start(name)
    call.repaired("format")
    for key, written in arguments.items():
        is_quoted = len(written) > 1 and written[0] in "\"'" and written[0] == written[-1]
        call.untyped(key, written[1:-1] if is_quoted else written)
    call.finish()


def _read_argument(source: Source, call: ToolCallWriter, key: str) -> Steps[str]:
    """Reads an argument; returns the delimiter after it. key: its key, if that was read."""
    rest, delimiter = yield from source.text_up_to(KEY_END, VALUE_END, "\n", VALUE)
    key = (key + rest).strip()
    if delimiter == VALUE_END:
        call.repaired("format")
        delimiter = KEY_END
    yield from source.space()
    if delimiter not in (KEY_END, VALUE):
        yield from source.expect(VALUE)
    elif delimiter == VALUE or (yield from source.accept(VALUE, ESCAPED_LINE + VALUE)) != VALUE:
        call.repaired("format")
        if (yield from source.comes(KEY, CLOSE)):  # a key without a value, or both in one
            key, is_assigned, value = key.partition("=")
            if is_assigned:
                call.untyped(key, value)
            return (yield from source.expect(KEY, CLOSE))
    if call.streams(key):
        delimiter = yield from _read_value(source, call, key, partial(call.text, key))
        call.end_text(key)
        return delimiter
    pieces = [(yield from read_json(source))]
    delimiter = yield from _read_value(source, call, key, pieces.append)
    call.untyped(key, "".join(pieces))
    return delimiter


def _read_value(source: Source, call: ToolCallWriter, key: str, into: Into) -> Steps[str]:
    """Reads a value, which may contain the delimiters that would end it, and passes it on. Returns
    the delimiter after it; empty if another call follows at once."""
    inside, is_example = 0, False
    """The number of arguments that begin within the value, and whether a whole call does."""
    while delimiter := (yield from source.up_to(*IN_VALUES, into=into)):
        bare = delimiter.lstrip("\n")
        if bare == KEY_END:
            delimiter += yield from source.space()
            begun = yield from source.accept(VALUE)
            inside += bool(begun)
            delimiter += begun
        elif inside:
            inside -= bare == VALUE_END
        elif bare == OPEN:
            is_example = True
        elif bare == KEY:
            awaited = (each + KEY_END for each in call.awaited - {key})
            if not is_example and (yield from source.comes(*awaited)):
                call.repaired("format")
                return KEY
        else:
            space = yield from source.space()
            if bare == VALUE_END and (following := (yield from source.accept(*AFTER_VALUE))):
                if following not in (KEY, CLOSE):
                    call.repaired("format")
                return following.removeprefix(ESCAPED_LINE)
            if (yield from source.comes(OPEN)) or (yield from source.stopped()):
                if bare == CLOSE:
                    call.repaired("format")
                return CLOSE
            if bare == VALUE_END and (yield from _is_call(source.lookahead(), call)):
                return ""
            if bare == VALUE_END and (yield from _is_brace(source.lookahead())):
                call.repaired("format")
                source.take(1)
                return (yield from source.expect_spaced(CLOSE))
            delimiter += space
        into(delimiter)
    raise Malformed("a value without an end")


def _is_brace(ahead: Lookahead) -> Steps[bool]:
    """Whether a brace follows that closes nothing, and after it the end of the block."""
    brace = yield from ahead.accept("}")
    yield from ahead.space()
    return bool(brace) and bool((yield from ahead.accept(CLOSE)))


def _is_call(ahead: Lookahead, call: ToolCallWriter) -> Steps[bool]:
    """Whether another call follows, without the delimiter before it."""
    name = (yield from ahead.run(NAME)).strip()
    yield from ahead.space()
    return call.knows(name) and bool((yield from ahead.accept(KEY, CLOSE)))


_PAIRS = PairArguments(
    key_opens=KEY, key_closes=KEY_END, value_opens=VALUE, value_closes=VALUE_END, closes_call=CLOSE
)


def _call_of(lark: Lark, tool: Tool) -> str:
    if not NAME.fullmatch(tool.name) or tool.name != tool.name.strip():
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    return f"{quoted(tool.name)} {_PAIRS.write(lark, tool)}"


GLM = CallFormat(
    _read_block,
    opens=(OPEN,),
    closes=(CLOSE,),
    inner=(KEY, KEY_END, VALUE, VALUE_END),
    ends_answer=True,
    blocks=(BlockGrammar(_call_of, after=CLOSE, unsupported=unsupported_as_text, space=r"\n?"),),
)
