"""Calls whose arguments are elements with the arguments' names as tags, as MiniMax M3 writes them.

`<invoke name="f"><city>Paris</city><tags><item>a</item></tags></invoke>`, with a sign before each
tag, so that values need no escapes. Lists are elements called `item`, and objects are elements
within elements.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_server import limits
from mlx_server.grammars.arguments import (
    MemberSchema,
    ValueSchema,
    arguments_of,
    listed_members,
    unsupported_as_text,
)
from mlx_server.grammars.grammar import UnsupportedKeyword
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import (
    BlockGrammar,
    CallFormat,
    UncallableTool,
    one_by_one_rule,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter, ToolCallWriter
from mlx_server.tool_parsers.json_calls import read_json_arguments
from mlx_server.tool_parsers.model_json import Malformed
from mlx_server.tool_parsers.named_calls import NamedCallFormat
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.value_rules import bare_value_rule, json_rule, marked_text

ITEM = "item"

WORDS = {f"<{word}/>": word for word in ("true", "false", "null")}
"""Values that are written as an element without content."""

SCALARS = frozenset({"string", "null", "boolean", "integer", "number"})

NAME = re.compile(r'[^<>"/ \n]+')
"""Matches names of tools and of elements."""


@dataclass(frozen=True)
class ElementArguments:
    sign: str
    """The text before each tag."""

    def end(self, name: str) -> str:
        return f"{self.sign}</{name}>"

    # Reading

    def read(
        self, source: Source, start: Callable[[], ToolCallWriter], ends: tuple[str, ...]
    ) -> Steps[ToolCallWriter]:
        call = start()
        while not (yield from source.after_space(*ends)):
            yield from source.expect_spaced(f"{self.sign}<")
            yield from self._read_argument(source, call)
        return call

    def _read_argument(self, source: Source, call: ToolCallWriter) -> Steps[None]:
        key, end = yield from self._read_opening_tag(source)
        key, opening = call.meant(key), end.replace("/", "", 1)
        if call.streams(key):
            if not (yield from source.up_to(end, into=partial(call.text, key))):
                raise Malformed("a value has no end")
            call.end_text(key)
        else:
            depth = limits.CALL_DEPTH
            trees = [(yield from self._read_value(source, call, end, depth))]
            while (yield from source.after_space(opening)):
                yield from source.expect_spaced(opening)
                trees.append((yield from self._read_value(source, call, end, depth)))
            if len(trees) > 1:  # a list whose items were written as elements of the same key
                call.repaired("format")
            call.untyped_tree(key, trees if len(trees) > 1 else trees[0])

    def _read_opening_tag(self, source: Source) -> Steps[tuple[str, str]]:
        """Returns the name in an opening tag, and the tag that closes the element."""
        text, closing = yield from source.text_up_to(">", "\n")
        if closing != ">":
            raise Malformed("a tag has no end")
        tag, _, named = text.partition(' name="')
        if not tag or tag.startswith("/"):
            raise Malformed("expected an element")
        return named.removesuffix('"') or tag, self.end(tag)

    def _read_value(self, source: Source, call: ToolCallWriter, end: str, depth: int) -> Steps[Any]:
        """Returns the text, or the value of the elements, in an element."""
        if not depth:
            raise Malformed("nested too deep")
        pieces: list[str] = []
        members: list[tuple[str, Any]] = []
        opens = f"{self.sign}<"
        while delimiter := (yield from source.up_to(end, opens, into=pieces.append)):
            if delimiter == end:
                return _folded(members, call) if members else _text_or_word("".join(pieces), call)
            if word := (yield from source.accept(*(each[1:] for each in WORDS))):
                pieces.append(f"<{word}")
                continue
            key, inner = yield from self._read_opening_tag(source)
            members.append((key, (yield from self._read_value(source, call, inner, depth - 1))))
        raise Malformed("a value has no end")

    # Writing

    def write(self, lark: Lark, tool: Tool) -> str:
        written = partial(self._member_rule, lark, limits.TEXT_SCHEMA_DEPTH)
        arguments = one_by_one_rule(arguments_of(tool), written, lark)
        space = lark.terminal(r"/\n?/")
        return f"{space} {arguments}"

    def unsupported(self, tool: Tool) -> Sequence[UnsupportedKeyword]:
        return unsupported_as_text(tool)

    def _member_rule(self, lark: Lark, depth: int, member: MemberSchema) -> str | None:
        if not NAME.fullmatch(member.key):
            return None
        opening = lark.text(f"{self.sign}<{member.key}>")
        space = lark.terminal(r"/\n?/")
        value = self._value_rule(member.value, lark, self.end(member.key), depth)
        return f"{opening} {value} {space}"

    def _value_rule(self, value: ValueSchema, lark: Lark, end: str, depth: int) -> str:
        """Returns the rule of a value and the tag that closes it."""
        value = value.target or value
        if value.types <= SCALARS:
            return bare_value_rule(value, lark, end, self.sign)
        closing = lark.text(end)
        elements = self._elements_rule(value, lark, depth) if depth else None
        if elements is None:
            return bare_value_rule(value, lark, end, self.sign)
        rest = value.types & SCALARS
        options = [f"{elements} {closing}"]
        if rest:
            options.append(f"{json_rule(value, lark, *rest)} {closing}")
        return lark.rule(" | ".join(options))

    def _elements_rule(self, value: ValueSchema, lark: Lark, depth: int) -> str | None:
        """Returns the rule of a value in elements; None where only JSON can follow the schema."""
        of_list = value.types - SCALARS == {"array"} and value.says_only(
            "type", "items", "minItems"
        )
        if of_list and (items := value.items):
            least, _ = value.counts("minItems", "maxItems")
            item = MemberSchema(ITEM, items, required=True)
            return f"({self._member_rule(lark, depth - 1, item)}){{{least},}}"
        keys = ("type", "properties", "required", "additionalProperties")
        if value.types - SCALARS == {"object"} and listed_members(value) and value.says_only(*keys):
            written = partial(self._member_rule, lark, depth - 1)
            return one_by_one_rule([listed_members(value)], written, lark)
        return None


def _text_or_word(written: str, call: ToolCallWriter) -> str:
    if not (word := WORDS.get(written.strip())):
        return written
    call.repaired("format")
    return word


def _folded(pairs: Sequence[tuple[str, Any]], call: ToolCallWriter) -> Any:
    keys = [key for key, _ in pairs]
    if set(keys) == {ITEM}:
        return [value for _, value in pairs]
    members: dict[str, list[Any]] = {}
    for key, value in pairs:
        members.setdefault(key, []).append(value)
    if len(members) < len(pairs):  # a list whose items were written as elements of the same key
        call.repaired("format")
    return {key: each if len(each) > 1 else each[0] for key, each in members.items()}


SIGN = "]<]minimax[>["
_MINIMAX_M3 = NamedCallFormat(
    opens=f"{SIGN}<tool_call>",
    before_name=f'{SIGN}<invoke name="',
    name=NAME,
    after_name='">',
    arguments=ElementArguments(SIGN),
    closes_call=f"{SIGN}</invoke>",
    between="",
    closes=f"{SIGN}</tool_call>",
    inner=(SIGN, f'{SIGN}<invoke name="'),
)
MINIMAX_M3 = _MINIMAX_M3.call_format()
MINIMAX_M3_WITHOUT_BLOCK = replace(
    replace(_MINIMAX_M3, opens=_MINIMAX_M3.before_name, repairs=("unmarked",)).call_format(),
    blocks=(),
)


# Kimi K3: elements between `<|open|>name<|sep|>` and `<|close|>name<|sep|>`. A call's arguments are
# elements too, each with its type, or one element with all of them as JSON. It has a reader of its
# own: in no other format do openings have attributes, in any order and with quotes and spaces that
# vary, so a record that describes them would have this one instance.

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"

QUOTE = '"'
ATTRIBUTE = re.compile(r"""\b(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'=]+))""")
WRITTEN = re.compile(r'(?>\s*\w+="[^"]*")*+')
"""Attributes without a mistake."""


def beginning(element: str) -> str:
    return f"{OPEN}{element}{SEPARATOR}"


def end(element: str) -> str:
    return f"{CLOSE}{element}{SEPARATOR}"


def spaced(delimiter: str, element: str) -> tuple[str, ...]:
    """Returns an opening or closing delimiter with spaces in it, which no template writes."""
    spaces = ((" ", ""), ("", " "), (" ", " "))
    return tuple(f"{delimiter}{before}{element}{after}{SEPARATOR}" for before, after in spaces)


def _ends(element: str) -> tuple[str, ...]:
    return (end(element), *spaced(CLOSE, element))


def _opens(element: str) -> tuple[str, ...]:
    """Returns the beginnings of an opening delimiter that has attributes."""
    return OPEN + element, f"{OPEN} {element}"


TOOLS, TOOLS_END = beginning("tools"), end("tools")


def _read_block(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    while True:
        literal = yield from source.accept_spaced(*_opens("call"), *_ends("tools"))
        if literal in _ends("tools"):
            return
        if not literal:
            # complete calls count, but what follows them is not part of them
            if (yield from source.peek()):
                raise Malformed("more than calls among the tools")
            return
        yield from _read_call(source, calls)


def _read_calls(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """Reads calls without a section around them, after the first one's opening."""
    yield from _read_call(source, calls)
    while (yield from source.after_space(*_opens("call"))):
        yield from source.expect_spaced(*_opens("call"))
        yield from _read_call(source, calls)


def _read_call(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    attributes, has_slips = yield from _read_attributes(source)
    call = calls.start(attributes.get("tool", ""))
    if has_slips:
        call.repaired("format")
    openings = (*_opens("argument"), *_opens("json"))
    while True:
        literal = yield from source.expect_spaced(*openings, "{", *_ends("call"))
        if literal in _ends("call"):
            call.finish()
            return
        if literal == "{":
            call.repaired("format")
            yield from read_json_arguments(source, lambda: call, _ends("call"))
        elif literal in _opens("argument"):
            yield from _read_argument(source, call)
        else:
            yield from _read_attributes(source)
            yield from source.expect_spaced("{")
            yield from read_json_arguments(source, lambda: call, _ends("json"))
            yield from source.expect_spaced(*_ends("json"))


def _read_argument(source: Source, call: ToolCallWriter) -> Steps[None]:
    attributes, has_slips = yield from _read_attributes(source)
    if has_slips:
        call.repaired("format")
    key, type = attributes.get("key"), attributes.get("type", "string")
    if key is None:
        raise Malformed("an argument has no key")
    key = call.meant(key)
    streams = type == "string" and call.streams(key)
    pieces: list[str] = []
    into = partial(call.text, key) if streams else pieces.append
    if not (yield from source.up_to(*_ends("argument"), into=into)):
        raise Malformed("an argument has no end")
    if streams:
        call.end_text(key)
    elif type == "string":
        call.value(key, "".join(pieces))
    else:
        call.untyped(key, "".join(pieces))


def _read_attributes(source: Source) -> Steps[tuple[dict[str, str], bool]]:
    """Returns the attributes of an opening delimiter, and whether they are written with
    mistakes."""
    text, closing = yield from source.text_up_to(OPEN, CLOSE, SEPARATOR)
    if closing != SEPARATOR:
        raise Malformed("an opening has no end")
    attributes = {
        match[1]: _unescaped(match[match.lastindex or 0]) for match in ATTRIBUTE.finditer(text)
    }
    return attributes, not WRITTEN.fullmatch(text.rstrip())


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _call_of(lark: Lark, tool: Tool) -> str:
    if not _is_writable(tool.name):
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    number = lark.terminal("/[1-9][0-9]{0,2}/")
    named = quoted(f'call tool="{_escaped(tool.name)}" index="')
    head = f"{lark.text(OPEN)} {named} {number} {quoted(QUOTE)} {lark.text(SEPARATOR)}"

    def written(member: MemberSchema) -> str | None:
        if not _is_writable(member.key):
            return None
        options = []
        for type in sorted(member.value.types):
            spelling = "number" if type == "integer" else type
            named = quoted(f'argument key="{_escaped(member.key)}" type="{spelling}"')
            if type == "string":
                value = marked_text(member.value, lark, end("argument"))
            else:
                value = f"{json_rule(member.value, lark, type)} {lark.text(end('argument'))}"
            options.append(f"{lark.text(OPEN)} {named} {lark.text(SEPARATOR)} {value}")
        return lark.rule(" | ".join(options))

    arguments = one_by_one_rule(arguments_of(tool), written, lark)
    return lark.rule(f"{head} {arguments} {lark.text(end('call'))}")


def _is_writable(name: str) -> bool:
    return not any(delimiter in name for delimiter in (OPEN, CLOSE, SEPARATOR))


def _escaped(name: str) -> str:
    return name.replace("&", "&amp;").replace('"', "&quot;")


KIMI_K3 = CallFormat(
    _read_block,
    opens=(TOOLS,),
    closes=(TOOLS_END,),
    blocks=(BlockGrammar(_call_of, between="", after=TOOLS_END, unsupported=unsupported_as_text),),
)
KIMI_K3_SPACED = CallFormat(
    _read_block, opens=spaced(OPEN, "tools"), closes=_ends("tools"), repairs=("format",)
)
KIMI_K3_CALLS = CallFormat(
    _read_calls, opens=_opens("call"), may_close=_ends("tools"), repairs=("format",)
)
