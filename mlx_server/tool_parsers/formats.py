"""The call formats of the families, except those in tags."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from mlx_server.messages import Tool
from mlx_server.tool_parsers import json_calls
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat, respelled
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import JsonCallForm, repaired, repaired_by_name
from mlx_server.tool_parsers.named_calls import (
    DeepSeekCallFormat,
    GemmaCallFormat,
    IdFirstCallFormat,
    IdLastCallFormat,
    KimiCallFormat,
    NamedCallFormat,
    gemma_arguments,
    python_arguments,
)
from mlx_server.tool_parsers.source import CACHED, Source, Steps
from mlx_server.tool_parsers.tag_formats import (
    QWEN3_CODER,
    QWEN3_CODER_WITHOUT_BLOCK,
    UNTAUGHT_TAGGED,
    untaught,
)

# Calls as JSON objects

_LLAMA_FORM = JsonCallForm(arguments=("parameters", "arguments"), before=("type", "function"))

BARE_JSON = CallFormat(
    json_calls.read_call_objects,
    begins=("{",),
    repair=repaired,
    ends_answer=True,
    blocks=(json_calls.bare_block(_LLAMA_FORM),),
)

_HERMES = json_calls.marked_json("<tool_call>", "</tool_call>")


def _hermes(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """Reads calls in JSON. Models that know Qwen3-Coder's format too write its tags there."""
    yield from source.space()
    if (yield from source.comes("<function=")):
        calls.misplaced += ("format",)
        yield from QWEN3_CODER.read(source, calls)
    else:
        yield from _HERMES.read(source, calls)


HERMES = replace(_HERMES, read=_hermes)
GRANITE = json_calls.marked_json("<|tool_call|>")
PHI4 = json_calls.marked_json("<|tool_call|>", "<|/tool_call|>")
FUNCTOOLS = json_calls.marked_json("functools[")
"""The opening includes the bracket, or `import functools` would be a call."""
FUNCTOOLS_OBJECT = CallFormat(
    json_calls.read_call_objects, opens=("functools{",), repairs=("format",)
)
NEMOTRON = json_calls.marked_json("<TOOLCALL>", "</TOOLCALL>")
COMMAND = json_calls.marked_json(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    JsonCallForm("tool_name", ("parameters",), before=("tool_call_id", "[0-9]{1,4}")),
)

TOOL_CALLS = json_calls.marked_json("<tool_calls>", "</tool_calls>")
"""The format of Jamba, Apriel and Hunyuan."""
PANGU = json_calls.marked_json("[unused11]", "[unused12]")
HYPERCLOVA = json_calls.marked_json("-> tool/function_call")
GRANITE_CODE = json_calls.marked_object("<function_call>")
LONGCAT_JSON = json_calls.marked_json("<longcat_tool_call>", "</longcat_tool_call>")
INKLING = json_calls.marked_json(
    "<|content_invoke_tool_json|>", "<|end_message|>", JsonCallForm(arguments=("args",))
)
COMMAND_R = json_calls.marked_json(
    "Action:", "```", JsonCallForm("tool_name", ("parameters",)), fence="```json"
)
INTERNLM = replace(
    json_calls.marked_json(
        "<|action_start|><|plugin|>", "<|action_end|>", JsonCallForm(arguments=("parameters",))
    ),
    opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
)
GIGACHAT = json_calls.marked_object(
    "function call<|role_sep|>\n", "<|function_call|>", follows=("<|message_sep|>",)
)

_PLAIN_FORM = JsonCallForm(arguments=("arguments", "parameters"))

PLAIN_OBJECT = CallFormat(
    json_calls.read_call_objects,
    begins=("{",),
    repairs=("unmarked",),
    ends_answer=True,
    blocks=(json_calls.bare_block(_PLAIN_FORM),),
)
PLAIN_ARRAY = CallFormat(
    json_calls.read_call_array,
    begins=("[",),
    repairs=("unmarked",),
    ends_answer=True,
    blocks=(json_calls.bare_array(_PLAIN_FORM),),
)

# Calls by name, with arguments in JSON

MISTRAL_CALL = IdLastCallFormat(
    opens="[TOOL_CALLS]",
    id_delimiter="[CALL_ID]",
    after_name="[ARGS]",
    inner=("[CALL_ID]", "[ARGS]"),
    may_be_json=True,
    repair_unit="block",
    ends_answer=True,
)
_MISTRAL_FORM = JsonCallForm(between=("id", "[a-zA-Z0-9]{9}"))
MISTRAL = replace(
    MISTRAL_CALL.call_format(json_calls.array_block(_MISTRAL_FORM)), may_close=("[/TOOL_CALLS]",)
)

LLAMA_FUNCTION = NamedCallFormat(
    opens="<function=",
    before_name="<function=",
    after_name=">",
    closes="</function>",
    space="",
    ends_answer=True,
).call_format()

_KIMI_K2 = KimiCallFormat(
    opens="<|tool_calls_section_begin|>",
    before_name="<|tool_call_begin|>",
    name=re.compile(r"[^<]+"),
    after_name="<|tool_call_argument_begin|>",
    closes_call="<|tool_call_end|>",
    between="",
    closes="<|tool_calls_section_end|>",
    inner=("<|tool_call_argument_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    repair_unit="call",
    ends_answer=True,
)
KIMI_K2 = _KIMI_K2.call_format()
KIMI_K2_SINGULAR = replace(
    _KIMI_K2,
    opens="<|tool_call_section_begin|>",
    closes="<|tool_call_section_end|>",
    repairs=("format",),
).call_format()
"""Kimi K2's format with delimiters that the vocabulary does not have, but the models write."""
KIMI_K2_WITHOUT_SECTION = replace(_KIMI_K2, opens=_KIMI_K2.before_name).call_format()

_APERTUS = NamedCallFormat(
    opens="<|tools_prefix|>",
    before_name='{"',
    after_name='":',
    before_arguments=" ",
    closes_call="}",
    between=",",
    closes="<|tools_suffix|>",
    around=("[", "]"),
    passed=("[", ",", "]"),
)
APERTUS = replace(_APERTUS.call_format(), repair=repaired_by_name)

_PLAMO = "<|plamo:{}:plamo|>"
_PLAMO_JSON = "<|plamo:constrain|>json<|plamo:msg|>"
_PLAMO_CALLS = NamedCallFormat(
    opens=_PLAMO.format("begin_tool_requests"),
    before_name=_PLAMO.format("begin_tool_request") + _PLAMO.format("begin_tool_name"),
    name=re.compile(r"[^<\n]+"),
    after_name=_PLAMO.format("end_tool_name") + _PLAMO.format("begin_tool_arguments"),
    before_arguments=_PLAMO_JSON,
    closes_call=_PLAMO.format("end_tool_arguments") + _PLAMO.format("end_tool_request"),
    between="",
    closes=_PLAMO.format("end_tool_requests"),
    inner=(_PLAMO_JSON,),
    repair_unit="block",
    space="",
)
PLAMO = _PLAMO_CALLS.call_format()
PLAMO_WITHOUT_SECTION = replace(
    replace(_PLAMO_CALLS, opens=_PLAMO_CALLS.before_name, closes="").call_format(),
    repairs=("format",),
    blocks=(),
)

SOLAR_OPEN = IdFirstCallFormat(
    opens="<|tool_call:begin|>",
    before_name="<|tool_call:begin|>",
    id_delimiter="<|tool_call:name|>",
    name=re.compile(r"[^<\n]+"),
    after_name="<|tool_call:args|>",
    closes_call="<|tool_call:end|>",
    inner=("<|tool_call:name|>", "<|tool_call:args|>"),
    repair_unit="call",
    space="",
).call_format()


# Calls in Python


def python_list(opens: str, closes: str) -> CallFormat:
    """`[f(a=1, b="x"), g()]` between delimiters."""
    return _python_block(opens, closes, listed=True, between=", ")


def python_lines(opens: str, closes: str) -> CallFormat:
    """Returns the format of one call `f(a=1, b="x")` a line between delimiters, without
    brackets."""
    return _python_block(opens, closes, listed=False, between="\n")


def _python_block(opens: str, closes: str, *, listed: bool, between: str) -> CallFormat:
    return NamedCallFormat(
        opens=opens,
        after_name="(",
        arguments=python_arguments(closes, bare_text=listed),
        between=between,
        closes=closes,
        around=("[", "]") if listed else ("", ""),
        passed=("[", ",", ";", "]"),
        may_be_json=True,
        repair_unit="block",
        space="",
    ).call_format()


MINICPM = NamedCallFormat(
    opens="<|tool_call_start|>",
    after_name="(",
    arguments=python_arguments("<|tool_call_end|>"),
    between="\n",
    closes="<|tool_call_end|>",
    around=("\n```python\n", "\n```\n"),
    passed=("```python", "```", ",", ";"),
    may_be_json=True,
    space="",
).call_format()
LFM2 = python_list("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA4_PYTHON = python_list("<|python_start|>", "<|python_end|>")
OLMO3 = python_lines("<function_calls>", "</function_calls>")
PYTHON_LINES = python_lines("", "")
_BARE_PYTHON = NamedCallFormat(
    begins="[",
    after_name="(",
    arguments=python_arguments(bare_text=True),
    between=", ",
    closes="]",
    passed=(",",),
    may_be_json=True,
    space="",
)
BARE_PYTHON = _BARE_PYTHON.call_format()


@lru_cache(maxsize=CACHED)
def _inline(read: Callable[..., Steps[None]], name: str, opening: str, *inner: str) -> CallFormat:
    """Returns the format of the calls of one tool within a text, without delimiters."""
    read = partial(read, name=name)
    return CallFormat(read, opens=(opening,), inner=inner, repairs=("unmarked",))


def inline_python(tools: Sequence[Tool]) -> tuple[CallFormat, ...]:
    """Returns the formats of `BARE_PYTHON`'s calls within a text."""
    return tuple(_inline(_BARE_PYTHON.read, tool.name, f"[{tool.name}(") for tool in tools)


def _tagged(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """Reads Llama's calls after its tag: in JSON, or in Python with brackets or without."""
    if (yield from source.accept_spaced("{")):
        yield from json_calls.read_call_objects(source, calls)
    elif (yield from source.accept("[")):
        yield from _BARE_PYTHON.read(source, calls)
    else:
        yield from replace(_BARE_PYTHON, between=None, closes="").read(source, calls)


LLAMA_TAGGED = CallFormat(
    _tagged,
    opens=("<|python_tag|>",),
    repair=repaired,
    ends_answer=True,
    blocks=(BlockGrammar(_LLAMA_FORM.call, between=";", read_on=json_calls.READ_ON),),
)


# Calls in Gemma's syntax


def _gemma(opens: str, closes: str, quote: str) -> NamedCallFormat:
    """`call:f{key:<|"|>text<|"|>,other:1}`"""
    return GemmaCallFormat(
        opens=opens,
        before_name="call:",
        name=re.compile(r"[^\s{}()<>]+"),
        after_name="{",
        arguments=gemma_arguments(quote, "{", closes),
        in_parentheses=gemma_arguments(quote, "(", closes),
        closes_call=closes,
        passed=(",", ";"),
        inner=(quote,),
    )


def _inline_gemma(bare: NamedCallFormat, tools: Sequence[Tool]) -> tuple[CallFormat, ...]:
    """Returns the formats of calls in Gemma's syntax without delimiters, within a text."""
    return tuple(
        _inline(bare.read, tool.name, f"call:{tool.name}{{", *bare.inner) for tool in tools
    )


_GEMMA4 = _gemma("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = _gemma("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4, FUNCTION_GEMMA = _GEMMA4.call_format(), _FUNCTION_GEMMA.call_format()
_BARE_GEMMA4, _BARE_FUNCTION_GEMMA = (
    replace(form, opens="", closes_call="", between="\n") for form in (_GEMMA4, _FUNCTION_GEMMA)
)
inline_gemma4 = partial(_inline_gemma, _BARE_GEMMA4)
inline_function_gemma = partial(_inline_gemma, _BARE_FUNCTION_GEMMA)


_DEEPSEEK = DeepSeekCallFormat(
    opens="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    name=re.compile(r"[^<>\n{]+"),
    after_name="<｜tool▁sep｜>",
    closes_call="<｜tool▁call▁end｜>",
    between="",
    closes="<｜tool▁calls▁end｜>",
    inner=("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    repair_unit="block",
    ends_answer=True,
    space="",
)
_WITHOUT_SECTION = replace(_DEEPSEEK, opens=_DEEPSEEK.before_name, repairs=("unmarked",))

DEEPSEEK = _DEEPSEEK.call_format()
DEEPSEEK_WITHOUT_SECTION = _WITHOUT_SECTION.call_format()
DEEPSEEK_RESPELLED = tuple(
    replace(form, repairs=("format", *form.repairs)).call_format()
    for known in (_DEEPSEEK, _WITHOUT_SECTION)
    for form in respelled(known)
)


UNTAUGHT_TAGS = (
    *("tools", "tool", "function", "function_call", "function-call", "functioncall"),
    *("function_calls", "tool_calls", "toolcall", "tool_use", "xml"),
)
"""The tags that models such as Qwen2.5-Coder make up in place of those that they were taught."""

FOREIGN_FORMATS: tuple[CallFormat, ...] = tuple(
    # no repair: it would hold a text that mentions a delimiter back to its end
    replace(each, repair=None, repairs=("format",), blocks=())
    for each in (
        *(HERMES, QWEN3_CODER_WITHOUT_BLOCK, *UNTAUGHT_TAGGED, MISTRAL, FUNCTOOLS),
        untaught(json_calls.tagged_json(*UNTAUGHT_TAGS)),
    )
)
"""Formats whose opening delimiter is certain to mean a call if a known tool's name follows it."""
