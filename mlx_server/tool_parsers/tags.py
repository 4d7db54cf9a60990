"""Calls between tags: `<function=f><parameter=key>value</parameter></function>` and its kin.

Values are not escaped, so one may hold the very tags that would end it. A closing tag is taken for
one only where markup goes on behind it; and a whole function inside of a value is the value's.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.repair.exact import ExactFloat
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers.bare_text import bare_value_rule, marked_text
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter, ToolCallWriter
from mlx_server.tool_parsers.parameters import UncallableTool, one_by_one_rule
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.unsupported_keywords import unsupported_as_text
from mlx_server.tool_parsers.value_schema import MemberSchema, ValueSchema, arguments_of


@dataclass(frozen=True)
class TagSyntax:
    """Opening ones without what stands in them."""

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    block_end: str = ""
    margin: str = ""
    """Stands between a value and its tags and is no part of it."""
    quote: str = ""
    """Of names."""
    says_types: bool = False
    """Whether a parameter's tag says if it is text, or JSON."""

    @property
    def in_values(self) -> tuple[str, ...]:
        """Those that may mean something inside of a value, with the white space before them."""
        anywhere = (self.parameter_end, self.function_end)
        of_lines = ("\n" + self.parameter, "\n" + self.function)
        return (*anywhere, *(self.margin + tag for tag in anywhere), *of_lines)


def tagged(opens: str, tags: TagSyntax) -> CallFormat:
    """Functions in a block."""
    block = BlockGrammar(
        partial(_call_of, tags=tags),
        between="",
        after=tags.block_end,
        unsupported=unsupported_as_text,
    )
    return CallFormat(partial(_block, tags=tags), (opens,), (tags.block_end,), blocks=(block,))


def without_block(tags: TagSyntax) -> CallFormat:
    """The same where the model has left out the mark of the block."""
    return CallFormat(
        partial(_functions, tags=tags),
        opens=(tags.function,),
        closes=(tags.block_end,),
        repairs=("unmarked",),
        blocks=(
            BlockGrammar(partial(_rest_of, tags=tags), unsupported=unsupported_as_text, space=""),
        ),
    )


def _call_of(lark: Lark, tool: Tool, tags: TagSyntax) -> str:
    return f"{lark.text(tags.function)} {_rest_of(lark, tool, tags)}"


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
    return lark.rule(f"{head} {arguments} {lark.text(tags.function_end)}")


def _value_of(value: ValueSchema, lark: Lark, tags: TagSyntax) -> str:
    """And what is left of the tag before it."""
    end = tags.margin + tags.parameter_end
    other = (tags.parameter_end, tags.function_end, "\n" + tags.parameter, "\n" + tags.function)
    if not tags.says_types:
        return f"{quoted('>' + tags.margin)} {bare_value_rule(value, lark, end, *other)}"
    text, json = quoted(' string="true">'), quoted(' string="false">')
    options = []
    if "string" in value.types:
        options.append(f"{text} {marked_text(value, lark, end, *other)}")
    if types := value.types - {"string"}:
        options.append(f"{json} {value.as_json(lark, *types)} {lark.text(end)}")
    return lark.rule(" | ".join(options))


def _named(name: str, tags: TagSyntax) -> str:
    return quoted(f"{tags.quote}{name}{tags.quote}")


def _is_name_writable(name: str, tags: TagSyntax) -> bool:
    """Whether `_head` reads it."""
    if not name or set(name) & {">", "\n"}:
        return False
    if tags.quote:
        return tags.quote not in name
    return name == name.strip() and name[0] not in "\"'" and name[-1] != "/"


def _block(source: Source, calls: ToolCallEmitter, tags: TagSyntax) -> Steps[None]:
    """One function or several, and the end of the block."""
    yield from source.space()
    yield from source.expect(tags.function)
    yield from _functions(source, calls, tags)


def _functions(source: Source, calls: ToolCallEmitter, tags: TagSyntax) -> Steps[None]:
    """As `_block`, after the first opening tag."""
    more = tags.function
    while more:
        yield from _function(source, calls, tags)
        yield from source.space()
        more = yield from source.accept(tags.function)
    if not (yield from source.accept(tags.block_end)) and (yield from source.peek()):
        raise Malformed("more than calls in a block")


def _function(source: Source, calls: ToolCallEmitter, tags: TagSyntax) -> Steps[None]:
    name, attributes = yield from _head(source)
    if not calls.knows(name):
        raise Malformed(f"there is no tool {name!r}")
    if attributes.endswith("/"):
        calls.start(name).finish()
        return
    yield from source.space()
    tag = yield from source.expect(tags.parameter, tags.function_end)
    call = calls.start(name)
    while tag == tags.parameter:
        tag = yield from _parameter(source, call, tags)
        if tag == tags.parameter_end:
            yield from source.space()
            tag = yield from source.accept(tags.parameter, tags.function_end)
    call.finish()


def _head(source: Source) -> Steps[tuple[str, str]]:
    """What an opening tag says: a name, in quotes or not, and what comes behind it."""
    pieces: list[str] = []
    if (yield from source.up_to(">", "\n", into=pieces.append)) != ">":
        raise Malformed("a tag without an end")
    text = "".join(pieces).strip()
    quote = text[:1]
    if quote and quote in "\"'":
        name, _, attributes = text[1:].partition(quote)
        return name, attributes
    return text.removesuffix("/"), text[-1:]


def _parameter(source: Source, call: ToolCallWriter, tags: TagSyntax) -> Steps[str]:
    """Returns the tag that ended it."""
    key, attributes = yield from _head(source)
    yield from source.accept(tags.margin)
    if call.streams(key) and 'string="false"' not in attributes:
        tag = yield from _value(source, tags, lambda piece: call.text(key, piece))
        call.end_text(key)
        return tag
    pieces: list[str] = []
    tag = yield from _value(source, tags, pieces.append)
    text = "".join(pieces)
    if 'string="true"' in attributes:
        call.value(key, text)
    elif 'string="false"' in attributes:
        call.value(key, _json(text))
    else:
        call.untyped(key, text)
    return tag


def _value(source: Source, tags: TagSyntax, into: Callable[[str], None]) -> Steps[str]:
    """Passes a value on; returns the tag that ended it."""
    inside = 0
    """Functions that were begun in it."""
    while tag := (yield from source.up_to(*tags.in_values, into=into)):
        bare = tag.lstrip("\n")
        if bare == tags.function:
            inside += 1
        elif inside:
            inside -= bare == tags.function_end
        elif (yield from _is_end(source, bare, tags)):
            return bare
        into(tag)
    raise Malformed("a value without an end")


def _is_end(source: Source, tag: str, tags: TagSyntax) -> Steps[bool]:
    """Whether the value ends at this tag, which was read: whether markup goes on behind it."""
    if tag == tags.parameter_end:
        following = (tags.parameter, tags.function_end, tags.block_end)
        return bool((yield from source.after_space(*following)))
    # the value's own end was forgotten
    if tag == tags.parameter:
        return True
    return bool((yield from source.after_space(tags.block_end))) or (yield from source.stopped())


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_float=ExactFloat)
    except (ValueError, RecursionError):
        return text
