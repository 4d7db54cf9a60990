"""Calls between tags: `<function=f><parameter=key>value</parameter></function>` and similar ones.

Values are not escaped, so one may contain the very tags that would end it. A closing tag ends a
value only where markup follows it; and a whole function inside a value is part of the value.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from mlx_server.tool_parsers import json_calls
from mlx_server.tool_parsers.call_format import (
    BlockGrammar,
    CallFormat,
    UncallableTool,
    one_by_one_rule,
    respelled,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter, ToolCallWriter
from mlx_server.tool_parsers.keyed_calls import keyed_calls
from mlx_server.tool_parsers.model_json import ExactFloat, Malformed, no_constant
from mlx_server.tool_parsers.named_calls import NamedCallFormat
from mlx_server.tool_parsers.source import Into, Source, Steps, discard
from mlx_server.tool_parsers.value_rules import bare_value_rule, json_rule, marked_text
from mlx_server.tool_parsers.values import read_json

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
    if (yield from source.accept_spaced("{")):
        calls.misplaced += ("format",)
        yield from json_calls.read_call_objects(source, calls, (tags.block_end,))
        return
    if not (yield from _is_passed(source, tags.before)):
        calls.misplaced += ("format",)
    if (yield from source.expect_spaced(*tags.functions)) != tags.function:
        calls.misplaced += ("format",)
    yield from _read_functions(source, calls, tags)


def _read_functions(source: Source, calls: ToolCallEmitter, tags: TagSyntax) -> Steps[None]:
    """Reads like `_read_block`, after the first opening tag."""
    more = tags.function
    while more:
        yield from _read_function(source, calls, tags)
        if not (yield from _is_passed(source, tags.before)):
            calls.misplaced += ("format",)
        more = yield from source.accept_spaced(*tags.functions)
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
    tag = yield from source.expect_spaced(*tags.parameters, tags.function_end, "{")
    call = calls.start(name)
    if tag == "{":
        call.repaired("format")
        ends = tuple(filter(None, (tags.function_end, tags.block_end)))
        yield from json_calls.read_json_arguments(source, lambda: call, ends)
        tag = yield from source.accept_spaced(tags.function_end)
    while tag in tags.parameters:
        if tag != tags.parameter:
            call.repaired("format")
        tag = yield from _read_parameter(source, call, tags)
        if tag == tags.parameter_end:
            tag = yield from source.accept_spaced(*tags.parameters, tags.function_end)
        else:
            call.repaired("format")
    if tag != tags.function_end or not (yield from _is_passed(source, tags.after)):
        call.repaired("format")
    while (yield from source.after_space(tags.function_end)):
        yield from source.expect_spaced(tags.function_end)
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
        more, end = yield from source.text_up_to(">", "\n")
        text = f"{text}>{more}" if text else more
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
    elif 'string="false"' in attributes and (parsed := _json_or_none(text)) is not None:
        call.value(key, parsed)
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
            return (yield from self.source.expect_spaced(tags.parameter_end))
        inside, nests = 0, False
        """The number of functions, and whether a parameter, that began in the value."""
        while tag := (yield from self.source.up_to(*tags.in_values, into=into)):
            bare = tag.lstrip("\n")
            if bare == tags.function:
                inside += 1
            elif inside:
                inside -= bare == tags.function_end
            elif (yield from self._is_end(bare)):
                return tags.parameter_end if bare == tags.garbled_end else bare
            elif tag != bare and not nests and (yield from self._is_doubled(bare)):
                return bare
            into(tag)
            nests = nests or bare == tags.parameter
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

    def _is_doubled(self, tag: str) -> Steps[bool]:
        """Whether the closing tag that was just read, on a line of its own, comes once more, and
        then markup. If so, it is read."""
        ahead, end = self.source.lookahead(), self.tags.parameter_end
        if tag != end or not (yield from ahead.accept_spaced(end)):
            return False
        if not (yield from ahead.accept_spaced(*self.tags.after_parameter)):
            return False
        yield from self.source.expect_spaced(end)
        self.call.repaired("format")
        return True

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
        if not (yield from ahead.accept_spaced(*self.tags.after_parameter)):
            return False
        yield from self.source.match(GARBLE, discard)
        yield from self.source.accept(">")
        self.call.repaired("format")
        return True


def _json_or_none(text: str) -> Any:
    """Returns the value of JSON text; None if it is no JSON, and for null."""
    try:
        return json.loads(text, parse_float=ExactFloat, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None


_FUNCTION = TagSyntax("<function=", "</function>", "<parameter=", "</parameter>")
_QWEN3_CODER = replace(_FUNCTION, block="<tool_call>", block_end="</tool_call>", margin="\n")

QWEN3_CODER, QWEN3_CODER_WITHOUT_BLOCK = (
    replace(each, inner=(_QWEN3_CODER.function_end,))
    for each in (tagged(_QWEN3_CODER), without_block(_QWEN3_CODER))
)
_ATTRIBUTED = TagSyntax("<function name=", "</function>", "<parameter name=", "</parameter>")

_SEED_OSS = replace(_FUNCTION, block="<seed:tool_call>", block_end="</seed:tool_call>")

SEED_OSS, SEED_OSS_WITHOUT_BLOCK = tagged(_SEED_OSS), without_block(_SEED_OSS)


def _invoked(block: str, sign: str = "", *, says_types: bool = False) -> TagSyntax:
    """`<invoke name="f"><parameter name="key">value</parameter></invoke>`, in a block. sign: stands
    before each name, that of the block as well if types are said."""
    block = f"{sign}{block}" if says_types else block
    return TagSyntax(
        function=f"<{sign}invoke name=",
        function_end=f"</{sign}invoke>",
        parameter=f"<{sign}parameter name=",
        parameter_end=f"</{sign}parameter>",
        block=f"<{block}>",
        block_end=f"</{block}>",
        quote='"',
        says_types=says_types,
    )


_CLAUDE = _invoked("function_calls")


def _read_mcp_call(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """Reads `<server_name>s</server_name><tool_name>f</tool_name><arguments>{...}</arguments>`."""
    if (yield from source.accept_spaced("<server_name>")):
        yield from source.text_up_to("</server_name>")
    yield from source.expect_spaced("<tool_name>")
    name, _ = yield from source.text_up_to("</tool_name>")
    calls.check_name(name.strip())
    yield from source.expect_spaced("<arguments>")
    yield from source.expect_spaced("{")
    ends = ("</arguments>", "</use_mcp_tool>")
    start = partial(calls.start, name.strip())
    call = yield from json_calls.read_json_arguments(source, start, ends)
    for end in ends:
        yield from source.expect_spaced(end)
    call.finish()


UNTAUGHT_TAGGED = (
    without_block(_CLAUDE),
    without_block(_ATTRIBUTED),
    CallFormat(_read_mcp_call, ("<use_mcp_tool>",), ("</use_mcp_tool>",)),
)
"""Claude's format, one between two others, and that of agents' prompts, which models write whose
templates have none of them."""


def untaught(json: CallFormat) -> CallFormat:
    """Returns a format of calls in JSON, between the tags of which they may stand in tags too."""

    def read(source: Source, calls: ToolCallEmitter) -> Steps[None]:
        yield from source.space()
        for tags in (_QWEN3_CODER, _CLAUDE, _ATTRIBUTED):
            if (yield from source.accept(tags.function)):
                yield from _read_functions(source, calls, replace(tags, block_end=""))
                yield from source.accept_spaced(*json.closes)
                return
        yield from json.read(source, calls)

    return replace(json, read=read)


_MINIMAX_M2 = _invoked("minimax:tool_call")
MINIMAX_M2, MINIMAX_M2_WITHOUT_BLOCK = tagged(_MINIMAX_M2), without_block(_MINIMAX_M2)
_DOTS = _invoked("dots_function_call")
DOTS, DOTS_WITHOUT_BLOCK = tagged(_DOTS), replace(without_block(_DOTS), blocks=())
_MUSE = _invoked("atem:function_calls", "atem:")
MUSE, MUSE_WITHOUT_BLOCK = tagged(_MUSE), replace(without_block(_MUSE), blocks=())

_STEP3 = TagSyntax(
    before=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
    function="<steptml:invoke name=",
    function_end="</steptml:invoke>",
    after=("<｜tool_call_end｜>",),
    parameter="<steptml:parameter name=",
    parameter_end="</steptml:parameter>",
    block="<｜tool_calls_begin｜>",
    block_end="<｜tool_calls_end｜>",
    quote='"',
)
STEP3 = replace(tagged(_STEP3), inner=(_STEP3.before[0], _STEP3.before[2], *_STEP3.after))
STEP3_WITHOUT_BLOCK = tuple(
    replace(each, repairs=("unmarked",), blocks=())
    for each in (
        tagged(replace(_STEP3, block=_STEP3.before[0], before=_STEP3.before[1:])),
        without_block(_STEP3),
    )
)
STEP3_RESPELLED = tuple(
    replace(tagged(tags), repairs=("format",), blocks=()) for tags in respelled(_STEP3)
)

_MINICPM5_TAGS = TagSyntax(
    function="<function name=",
    function_end="</function>",
    parameter="<param name=",
    parameter_end="</param>",
    quote='"',
    cdata=True,
)
MINICPM5 = replace(
    without_block(_MINICPM5_TAGS, taught=True),
    inner=(_MINICPM5_TAGS.parameter, _MINICPM5_TAGS.parameter_end, _MINICPM5_TAGS.function_end),
)

MINICPM5_SPACED = replace(
    MINICPM5, opens=(f"{_MINICPM5_TAGS.function[:-1]} =",), repairs=("format",), blocks=()
)

DSML, GCML = "｜DSML｜", "｜GCML｜"
"""The text before the names in DeepSeek's tags, from V3.2 on, and in GigaChat's."""


_DSML = tuple(
    _invoked(block, sign, says_types=True)
    for block, sign in (("function_calls", DSML), ("tool_calls", DSML), ("calls", f"{DSML} "))
)
_V32, _V4, _V41 = _DSML
DSML_FORMATS = tuple(
    replace(each, inner=(DSML,))
    for each in (
        *map(tagged, _DSML),
        *(replace(without_block(tags), blocks=()) for tags in (_V4, _V41)),
    )
)
"""The formats of V3.2, V4 and V4.1, and V4's without the tags of the block, with which V3.2
agrees."""


def _respelled_dsml(*known: TagSyntax) -> tuple[CallFormat, ...]:
    return tuple(
        replace(call_format, repairs=("format", *call_format.repairs), blocks=())
        for each in known
        for tags in respelled(each)
        for call_format in (tagged(tags), without_block(tags))
    )


_SLIP = _invoked("tool_calls", f"{DSML}r:", says_types=True)
_R_V4 = replace(_V4, block=_SLIP.block, function=_SLIP.function, parameter=_SLIP.parameter)
DSML_RESPELLED = (
    *_respelled_dsml(*_DSML),
    # V4 sometimes opens tags so, and closes them as it was taught
    replace(tagged(_R_V4), repairs=("format",), blocks=()),
)
_GIGACHAT35 = _invoked("tool_calls", GCML, says_types=True)
GIGACHAT35 = replace(tagged(_GIGACHAT35), inner=(GCML,))
GIGACHAT35_WITHOUT_BLOCK = replace(without_block(_GIGACHAT35), inner=(GCML,), blocks=())
GIGACHAT35_RESPELLED = _respelled_dsml(_GIGACHAT35)


# Keys and values in delimiters of their own


def _alone(form: NamedCallFormat) -> CallFormat:
    """Returns the format of one call without a section around it."""
    alone = replace(form, opens=form.before_name, between=None, closes="", repairs=("format",))
    return replace(alone.call_format(), blocks=())


def _suffixed(suffix: str) -> NamedCallFormat:
    """Hy3's delimiters end in a suffix that is the same throughout a checkpoint."""
    return keyed_calls(
        key_opens=f"<arg_key{suffix}>",
        key_closes=f"</arg_key{suffix}>",
        value_opens=f"<arg_value{suffix}>",
        value_closes=f"</arg_value{suffix}>",
        opens=f"<tool_calls{suffix}>",
        before_name=f"<tool_call{suffix}>",
        after_name=f"<tool_sep{suffix}>",
        closes_call=f"</tool_call{suffix}>",
        closes=f"</tool_calls{suffix}>",
    )


_HY3, _HY3_OPEN_SOURCE = _suffixed(""), _suffixed(":opensource")
HY3, HY3_OPEN_SOURCE = _HY3.call_format(), _HY3_OPEN_SOURCE.call_format()
HY3_ALONE = (_alone(_HY3), _alone(_HY3_OPEN_SOURCE))

LONGCAT = replace(
    keyed_calls(
        key_opens="<longcat_arg_key>",
        key_closes="</longcat_arg_key>",
        value_opens="<longcat_arg_value>",
        value_closes="</longcat_arg_value>",
        before_name="<longcat_tool_call>",
        closes_call="</longcat_tool_call>",
    ),
    may_be_json=True,
).call_format()

SOLAR_OPEN2 = keyed_calls(
    key_opens="<|tool_arg:start|>",
    key_closes="<|tool_arg:value|>",
    value_closes="<|tool_arg:end|>",
    before_name="<|tool_call:start|>",
    closes_call="<|tool_call:end|>",
).call_format()

_K2_HORIZON = keyed_calls(
    key_opens="<ifm|arg_key>",
    key_closes="</ifm|arg_key>",
    type_opens="<ifm|arg_type>",
    type_closes="</ifm|arg_type>",
    value_opens="<ifm|arg_value>",
    value_closes="</ifm|arg_value>",
    opens="<ifm|tool_calls>",
    before_name="<ifm|tool_call>",
    closes_call="</ifm|tool_call>",
    closes="</ifm|tool_calls>",
)
K2_HORIZON = _K2_HORIZON.call_format()
K2_HORIZON_ALONE = _alone(_K2_HORIZON)
