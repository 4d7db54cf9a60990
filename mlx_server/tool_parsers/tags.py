"""Calls between tags: `<function=f><parameter=key>value</parameter></function>` and similar ones.

Values are not escaped, so one may contain the very tags that would end it. A closing tag ends a
value only where markup follows it; and a whole function inside a value is part of the value.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_server.grammars.arguments import (
    MemberSchema,
    ValueSchema,
    arguments_of,
    unsupported_as_text,
)
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.tool_parsers import json_calls, values
from mlx_server.tool_parsers.call_format import (
    BlockGrammar,
    CallFormat,
    UncallableTool,
    one_by_one_rule,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter, ToolCallWriter
from mlx_server.tool_parsers.json_calls import check_end
from mlx_server.tool_parsers.model_json import ExactFloat, Malformed
from mlx_server.tool_parsers.source import Into, Source, Steps
from mlx_server.tool_parsers.value_rules import bare_value_rule, json_rule, marked_text
from mlx_server.tool_parsers.values import JSON, read_json

CDATA, CDATA_END = "<![CDATA[", "]]>"
LINE = re.compile(r"[^\n]+")
APART = re.compile(r"\n[^\n]+\n")
GARBLE = re.compile(r"[\w/]+")
CONTROL_TOKEN = re.compile(r"<\|[^<>|]+\|\Z")
"""Matches a control token without its last bracket, at the end of a text."""


@dataclass(frozen=True)
class TagSyntax:
    """The tags of one format; opening tags end where a name or attributes follow."""

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    block: str = ""
    """The delimiter that opens a block of functions, if they stand in one."""
    block_end: str = ""
    margin: str = ""
    """The text between a value and its tags that is not part of the value."""
    quote: str = ""
    """The quote around names."""
    says_types: bool = False
    """Whether a parameter's tag says if the value is text or JSON."""
    cdata: bool = False
    """Whether a value may stand in a CDATA section, in which tags have no meaning."""
    before: tuple[str, ...] = ()
    """Texts before a function, some of which models leave out."""
    after: tuple[str, ...] = ()
    """Texts after a function, some of which models leave out."""

    @property
    def in_values(self) -> tuple[str, ...]:
        """Delimiters that may mean something inside of a value, with the white space before
        them."""
        ends = (self.parameter_end, self.garbled_end, self.function_end)
        others = (self.function_end, self.parameter, self.function)
        lines = (*(self.margin + tag for tag in ends), *("\n" + tag for tag in others))
        return tuple(dict.fromkeys((*ends, *lines)))

    @property
    def garbled_end(self) -> str:
        """The beginning of a closing tag that has more in it, or lacks its last bracket."""
        return self.parameter_end.removesuffix(">")

    @property
    def after_parameter(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.parameters, self.function_end, self.block_end)))

    @property
    def after_function(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.after, self.block_end)))

    @property
    def functions(self) -> tuple[str, ...]:
        return _spellings(self.function)

    @property
    def parameters(self) -> tuple[str, ...]:
        return _spellings(self.parameter)


def _spellings(tag: str) -> tuple[str, ...]:
    """Returns an opening tag, and the forms in which it is written by mistake."""
    return (tag, f"{tag[:-1]} =", f"{tag[:-1]} ") if tag.endswith("=") else (tag,)


def tagged(tags: TagSyntax) -> CallFormat:
    """Returns the format of functions in a block."""
    block = BlockGrammar(
        partial(_call_of, tags=tags),
        between="",
        after=tags.block_end,
        unsupported=unsupported_as_text,
    )
    read = partial(_read_block, tags=tags)
    return CallFormat(read, (tags.block,), (tags.block_end,), ends_answer=True, blocks=(block,))


def without_block(tags: TagSyntax, *, taught: bool = False) -> CallFormat:
    """Returns the format without the block's delimiter. taught: whether models are trained to omit
    it."""
    return CallFormat(
        partial(_read_functions, tags=tags),
        opens=(tags.function,),
        closes=(tags.block_end,) if tags.block_end else (),
        repairs=() if taught else ("unmarked",),
        ends_answer=True,
        blocks=(
            BlockGrammar(partial(_rest_of, tags=tags), unsupported=unsupported_as_text, space=""),
        ),
    )


def _call_of(lark: Lark, tool: Tool, tags: TagSyntax) -> str:
    return f"{lark.text(''.join((*tags.before, tags.function)))} {_rest_of(lark, tool, tags)}"


def _rest_of(lark: Lark, tool: Tool, tags: TagSyntax) -> str:
    if not _is_name_writable(tool.name, tags):
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    space = lark.terminal(r"/[\x20\n]{1,2}/")
    head = f"{_named(tool.name, tags)} {quoted('>')} {space}?"

    def written(member: MemberSchema) -> str | None:
        if not _is_name_writable(member.key, tags):
            return None
        name = f"{lark.text(tags.parameter)} {_named(member.key, tags)}"
        return f"{name} {_value_of(member.value, lark, tags)} {space}?"

    arguments = one_by_one_rule(arguments_of(tool), written, lark)
    end = lark.text("".join((tags.function_end, *tags.after)))
    return lark.rule(f"{head} {arguments} {end}")


def _value_of(value: ValueSchema, lark: Lark, tags: TagSyntax) -> str:
    """Returns the rule of the value, and the rest of the tag before it."""
    end = tags.margin + tags.parameter_end
    other = (tags.garbled_end, tags.function_end, "\n" + tags.parameter, "\n" + tags.function)
    if not tags.says_types:
        return f"{quoted('>' + tags.margin)} {bare_value_rule(value, lark, end, *other)}"
    text, json = quoted(' string="true">'), quoted(' string="false">')
    options = []
    if "string" in value.types:
        options.append(f"{text} {marked_text(value, lark, end, *other)}")
    if types := value.types - {"string"}:
        options.append(f"{json} {json_rule(value, lark, *types)} {lark.text(end)}")
    return lark.rule(" | ".join(options))


def _named(name: str, tags: TagSyntax) -> str:
    return quoted(f"{tags.quote}{name}{tags.quote}")


def _is_name_writable(name: str, tags: TagSyntax) -> bool:
    """Whether `_read_head` can read the name."""
    if not name or set(name) & {">", "\n"}:
        return False
    if tags.quote:
        return tags.quote not in name
    return name == name.strip() and name[0] not in "\"'" and name[-1] != "/"


def _read_block(source: Source, calls: ToolCallEmitter, tags: TagSyntax) -> Steps[None]:
    """Reads one function or several, and the end of the block."""
    yield from source.space()
    if (yield from source.accept("{")):
        calls.misplaced += ("format",)
        yield from json_calls.read_call_objects(source, calls, (tags.block_end,))
        return
    if not (yield from _is_passed(source, tags.before)):
        calls.misplaced += ("format",)
    yield from source.space()
    if (yield from source.expect(*tags.functions)) != tags.function:
        calls.misplaced += ("format",)
    yield from _read_functions(source, calls, tags)


def _read_functions(source: Source, calls: ToolCallEmitter, tags: TagSyntax) -> Steps[None]:
    """Reads like `_read_block`, after the first opening tag."""
    more = tags.function
    while more:
        yield from _read_function(source, calls, tags)
        if not (yield from _is_passed(source, tags.before)):
            calls.misplaced += ("format",)
        yield from source.space()
        more = yield from source.accept(*tags.functions)
    if not tags.block_end:
        return
    if not (yield from source.accept(tags.block_end)) and (yield from source.peek()):
        raise Malformed("more than calls in a block")


def _is_passed(source: Source, texts: tuple[str, ...]) -> Steps[bool]:
    """Skips these texts, and white space before each. Returns whether all of them came."""
    is_whole = True
    for text in texts:
        yield from source.space()
        is_whole = bool((yield from source.accept(text))) and is_whole
    return is_whole


def _read_function(source: Source, calls: ToolCallEmitter, tags: TagSyntax) -> Steps[None]:
    name, attributes, has_slip = yield from _read_head(source, calls.knows)
    calls.check_name(name)
    if has_slip:
        calls.misplaced += ("format",)
    if attributes.endswith("/"):
        call = calls.start(name)
        if not (yield from _is_passed(source, tags.after)):
            call.repaired("format")
        call.finish()
        return
    yield from source.space()
    tag = yield from source.expect(*tags.parameters, tags.function_end, "{")
    call = calls.start(name)
    if tag == "{":
        call.repaired("format")
        ends = tuple(filter(None, (tags.function_end, tags.block_end)))
        yield from values.arguments(source, JSON, lambda: call, ends)
        yield from check_end(source, call, ends)
        yield from source.space()
        tag = yield from source.accept(tags.function_end)
    while tag in tags.parameters:
        if tag != tags.parameter:
            call.repaired("format")
        tag = yield from _read_parameter(source, call, tags)
        if tag == tags.parameter_end:
            yield from source.space()
            tag = yield from source.accept(*tags.parameters, tags.function_end)
        else:
            call.repaired("format")
    if tag != tags.function_end or not (yield from _is_passed(source, tags.after)):
        call.repaired("format")
    call.finish()


def _read_head(
    source: Source, knows: Callable[[str], bool], doubled: str = ""
) -> Steps[tuple[str, str, bool]]:
    """Returns the name in an opening tag, in quotes or not, what follows it there, and whether it
    has a slip: a known name may end a line on which the tag's last bracket is missing.

    doubled: the tag's first word, which may come again.
    """
    text, has_slip = "", False
    while not text or CONTROL_TOKEN.search(text):  # a control token in a name is not the tag's end
        pieces = [text and f"{text}>"]
        end = yield from source.up_to(">", "\n", into=pieces.append)
        text = "".join(pieces)
        if doubled and text.startswith(doubled):
            text, has_slip = text[len(doubled) :], True
        if end != ">":
            if not (end and knows(text.strip())):
                raise Malformed("a tag without an end")
            return text.strip(), "", True
    text = text.strip()
    quote = text[:1]
    if quote and quote in "\"'":
        name, _, attributes = text[1:].partition(quote)
        return name.strip(), attributes, has_slip or name != name.strip()
    return text.removesuffix("/"), text[-1:], has_slip


def _read_parameter(source: Source, call: ToolCallWriter, tags: TagSyntax) -> Steps[str]:
    """Reads a parameter; returns the tag that ended it."""
    doubled = "" if tags.quote else tags.parameter.lstrip("<")
    key, attributes, has_slip = yield from _read_head(source, call.known.__contains__, doubled)
    if has_slip:
        call.repaired("format")
    yield from source.accept(tags.margin)
    value = _Value(source, tags, call, key)
    is_text = call.streams(key) and 'string="false"' not in attributes
    if is_text and not (yield from _may_have_margin(source, tags)):
        tag = yield from value.read(partial(call.text, key))
        call.end_text(key)
        return tag
    pieces = [] if is_text else [(yield from read_json(source))]
    tag = yield from value.read(pieces.append)
    text = _without_margin("".join(pieces), call, tags)
    if is_text or 'string="true"' in attributes:
        call.value(key, text)
    elif 'string="false"' in attributes and (found := _json_or_none(text)) is not None:
        call.value(key, found)
    else:
        call.untyped(key, text)
    return tag


def _may_have_margin(source: Source, tags: TagSyntax) -> Steps[bool]:
    """Whether one line comes that has line breaks around it, where the format has none."""
    ahead = source.lookahead()
    if tags.margin or tags.says_types or not (yield from ahead.accept("\n")):
        return False
    yield from ahead.run(LINE)
    return bool((yield from ahead.accept("\n" + tags.parameter_end)))


def _without_margin(text: str, call: ToolCallWriter, tags: TagSyntax) -> str:
    """Removes the line breaks next to the tags from a value of one line. Those around several lines
    are part of the value: a file may begin and end with one. So are those of a strict tool, whose
    schema may require them."""
    if tags.margin or tags.says_types or call.is_strict:
        return text
    if not (APART.fullmatch(text) and call.may_be_repaired):
        return text
    call.repaired("format")
    return text[1:-1]


@dataclass(frozen=True)
class _Value:
    source: Source
    tags: TagSyntax
    call: ToolCallWriter
    key: str

    def read(self, into: Into) -> Steps[str]:
        """Passes a value on; returns the tag that ended it."""
        tags = self.tags
        if tags.cdata and (yield from self.source.accept(CDATA)):
            yield from self.source.up_to(CDATA_END, into=into)
            yield from self.source.space()
            return (yield from self.source.expect(tags.parameter_end))
        inside = 0
        """The number of functions that began in the value."""
        while tag := (yield from self.source.up_to(*tags.in_values, into=into)):
            bare = tag.lstrip("\n")
            if bare == tags.function:
                inside += 1
            elif inside:
                inside -= bare == tags.function_end
            elif (yield from self._is_end(bare)):
                return tags.parameter_end if bare == tags.garbled_end else bare
            into(tag)
        raise Malformed("a value without an end")

    def _is_end(self, tag: str) -> Steps[bool]:
        """Whether the value ends at this tag, which was just read: whether markup follows it."""
        source, tags = self.source, self.tags
        if tag == tags.parameter_end:
            if (yield from source.after_space(*tags.after_parameter)):
                return True
            return not self.call.lacks(self.key) and (yield from source.stopped())
        if tag == tags.garbled_end:
            return (yield from self._is_garbled())
        # the closing tag of the value is missing
        if tag == tags.parameter:
            return (yield from self._is_parameter())
        return bool((yield from source.after_space(*tags.after_function))) or (
            yield from source.stopped()
        )

    def _is_parameter(self) -> Steps[bool]:
        """Whether another parameter that the tool has, and that has no value yet, comes."""
        quotes = dict.fromkeys((self.tags.quote, "", '"', "'"))
        names = [
            f"{quote}{key}{quote}{end}"
            for key in self.call.awaited - {self.key}
            for quote in quotes
            for end in (">", " ")
        ]
        return bool((yield from self.source.comes(*names)))

    def _is_garbled(self) -> Steps[bool]:
        """Reads the rest of a closing tag that is not written as it should be."""
        ahead = self.source.lookahead()
        yield from ahead.run(GARBLE)
        yield from ahead.accept(">")
        yield from ahead.space()
        if not (yield from ahead.accept(*self.tags.after_parameter)):
            return False
        yield from self.source.match(GARBLE, discard)
        yield from self.source.accept(">")
        self.call.repaired("format")
        return True


def discard(piece: str) -> None:
    """Ignores a piece of text."""


def _json_or_none(text: str) -> Any:
    """Returns the value of JSON text; None if it is no JSON, and for null."""
    try:
        return json.loads(text, parse_float=ExactFloat)
    except (ValueError, RecursionError):
        return None
