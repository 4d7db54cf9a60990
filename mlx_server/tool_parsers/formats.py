"""The call formats of the families."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mlx_server.messages import Tool
from mlx_server.tool_parsers import marked_json
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import COLON, GAP, JsonCallForm, repaired
from mlx_server.tool_parsers.named_calls import PYTHON, NamedCallFormat, gemma_arguments
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.tags import TagSyntax, tagged, without_block

# Calls as JSON objects

_LLAMA_FORM = JsonCallForm(
    arguments="(parameters|arguments)", before=rf'("type"{COLON}"function",{GAP})?'
)

BARE_JSON = CallFormat(
    marked_json.objects,
    begins=("{",),
    repair=repaired,
    blocks=(marked_json.bare_block(_LLAMA_FORM),),
)

HERMES = marked_json.marked_json("<tool_call>", "</tool_call>")
GRANITE = marked_json.marked_json("<|tool_call|>")
PHI4 = marked_json.marked_json("<|tool_call|>", "<|/tool_call|>")
FUNCTOOLS = marked_json.marked_json("functools[")
"""With its bracket, or `import functools` would be one."""
NEMOTRON = marked_json.marked_json("<TOOLCALL>", "</TOOLCALL>")
COMMAND = marked_json.marked_json(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    JsonCallForm(
        "tool_name", "parameters", before=rf'("tool_call_id"{COLON}"[0-9]{{1,4}}",{GAP})?'
    ),
)

_PLAIN_FORM = JsonCallForm(arguments="(arguments|parameters)")

PLAIN_OBJECT = CallFormat(
    marked_json.objects,
    begins=("{",),
    repairs=("unmarked",),
    blocks=(marked_json.bare_block(_PLAIN_FORM),),
)
PLAIN_ARRAY = CallFormat(
    marked_json.array,
    begins=("[",),
    repairs=("unmarked",),
    blocks=(marked_json.bare_array(_PLAIN_FORM),),
)

# Calls by name, with arguments in JSON

MISTRAL_CALL = NamedCallFormat(
    opens="[TOOL_CALLS]",
    id_mark="[CALL_ID]",
    after_name="[ARGS]",
    inner=("[CALL_ID]", "[ARGS]"),
    may_be_json=True,
    repair_unit="block",
)
_MISTRAL_FORM = JsonCallForm(between=rf'("id"{COLON}"[a-zA-Z0-9]{{9}}",{GAP})?')
MISTRAL = MISTRAL_CALL.call_format(marked_json.array_block(_MISTRAL_FORM))

LLAMA_FUNCTION = NamedCallFormat(
    opens="<function=", before_name="<function=", after_name=">", closes="</function>", space=""
).call_format()

_DEEPSEEK = NamedCallFormat(
    opens="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    name=re.compile(r"[^<>\n{]+"),
    after_name="<｜tool▁sep｜>",
    closes_call="<｜tool▁call▁end｜>",
    between="",
    closes="<｜tool▁calls▁end｜>",
    inner=("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    fenced=True,
    repair_unit="block",
    space="",
)
DEEPSEEK = _DEEPSEEK.call_format()
DEEPSEEK_WITHOUT_SECTION = replace(
    _DEEPSEEK, opens=_DEEPSEEK.before_name, repairs=("unmarked",)
).call_format()

_KIMI_K2 = NamedCallFormat(
    opens="<|tool_calls_section_begin|>",
    before_name="<|tool_call_begin|>",
    name=re.compile(r"[^<]+"),
    after_name="<|tool_call_argument_begin|>",
    closes_call="<|tool_call_end|>",
    between="",
    closes="<|tool_calls_section_end|>",
    inner=("<|tool_call_argument_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    numbered=True,
    noisy=True,
    repair_unit="call",
)
KIMI_K2 = _KIMI_K2.call_format()
KIMI_K2_WITHOUT_SECTION = replace(_KIMI_K2, opens=_KIMI_K2.before_name).call_format()

_GLM4 = NamedCallFormat(name=re.compile(r"[^\n]+"), after_name="\n")


def glm4(tools: Sequence[Tool]) -> tuple[CallFormat, ...]:
    """One for each tool, as nothing but its name tells a call from text."""
    made = _GLM4.call_format()
    return tuple(
        replace(made, read=partial(_GLM4.read, name=tool.name), begins=(f"{tool.name}\n",))
        for tool in tools
    )


# Calls in Python


def python_list(opens: str, closes: str) -> CallFormat:
    """`[f(a=1, b="x"), g()]` between marks."""
    return _python_block(opens, closes, listed=True, between=", ")


def python_lines(opens: str, closes: str) -> CallFormat:
    """The same without brackets, one call a line."""
    return _python_block(opens, closes, listed=False, between="\n")


def _python_block(opens: str, closes: str, *, listed: bool, between: str) -> CallFormat:
    return NamedCallFormat(
        opens=opens,
        after_name="(",
        arguments=PYTHON,
        between=between,
        closes=closes,
        listed=listed,
        passed=("[", ",", ";", "]"),
        may_be_json=True,
        space="",
    ).call_format()


LFM2 = python_list("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA4_PYTHON = python_list("<|python_start|>", "<|python_end|>")
OLMO3 = python_lines("<function_calls>", "</function_calls>")
_BARE_PYTHON = NamedCallFormat(
    begins="[",
    after_name="(",
    arguments=PYTHON,
    between=", ",
    closes="]",
    passed=(",",),
    may_be_json=True,
    space="",
)
BARE_PYTHON = _BARE_PYTHON.call_format()


def _tagged(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    """Llama's calls after its tag: in JSON, or in Python with brackets or without."""
    yield from source.space()
    if (yield from source.accept("{")):
        yield from marked_json.objects(source, calls)
    elif (yield from source.accept("[")):
        yield from _BARE_PYTHON.read(source, calls)
    else:
        yield from replace(_BARE_PYTHON, between=None, closes="").read(source, calls)


LLAMA_TAGGED = CallFormat(
    _tagged,
    opens=("<|python_tag|>",),
    repair=repaired,
    blocks=(BlockGrammar(_LLAMA_FORM.call, between=";", read_on=marked_json.READ_ON),),
)


# Calls in Gemma's syntax


def _gemma(opens: str, closes: str, quote: str) -> CallFormat:
    """`call:f{key:<|"|>text<|"|>,other:1}`"""
    return NamedCallFormat(
        opens=opens,
        before_name="call:",
        name=re.compile(r"[^\s{}<>]+"),
        after_name="{",
        arguments=gemma_arguments(quote),
        closes_call=closes,
        inner=(quote,),
    ).call_format()


GEMMA4 = _gemma("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma("<start_function_call>", "<end_function_call>", "<escape>")


# Calls in tags

_FUNCTION = TagSyntax("<function=", "</function>", "<parameter=", "</parameter>")
_QWEN3_CODER = replace(_FUNCTION, block_end="</tool_call>", margin="\n")

QWEN3_CODER = tagged("<tool_call>", _QWEN3_CODER)
QWEN3_CODER_WITHOUT_BLOCK = without_block(_QWEN3_CODER)

SEED_OSS = tagged("<seed:tool_call>", replace(_FUNCTION, block_end="</seed:tool_call>"))

MINIMAX_M2 = tagged(
    "<minimax:tool_call>",
    TagSyntax(
        function="<invoke name=",
        function_end="</invoke>",
        parameter="<parameter name=",
        parameter_end="</parameter>",
        block_end="</minimax:tool_call>",
        quote='"',
    ),
)

DSML = "｜DSML｜"
"""The sign of DeepSeek's markup language, from V3.2 on."""


def _dsml(block: str, gap: str = "") -> CallFormat:
    """gap: what stands between the sign and each name."""
    mark = DSML + gap
    tags = TagSyntax(
        function=f"<{mark}invoke name=",
        function_end=f"</{mark}invoke>",
        parameter=f"<{mark}parameter name=",
        parameter_end=f"</{mark}parameter>",
        block_end=f"</{mark}{block}>",
        quote='"',
        says_types=True,
    )
    return replace(tagged(f"<{mark}{block}>", tags), inner=(DSML,))


DSML_FORMATS = (_dsml("function_calls"), _dsml("tool_calls"), _dsml("calls", gap=" "))
"""Of V3.2, V4 and V4.1."""
