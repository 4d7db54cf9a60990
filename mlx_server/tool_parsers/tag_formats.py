"""The call formats whose calls and arguments stand in tags."""

from dataclasses import replace

from mlx_server.tool_parsers.call_format import CallFormat, respelled
from mlx_server.tool_parsers.keyed_calls import keyed_calls
from mlx_server.tool_parsers.named_calls import NamedCallFormat
from mlx_server.tool_parsers.tags import TagSyntax, tagged, without_block

_FUNCTION = TagSyntax("<function=", "</function>", "<parameter=", "</parameter>")
_QWEN3_CODER = replace(_FUNCTION, block_end="</tool_call>", margin="\n")

QWEN3_CODER = tagged("<tool_call>", _QWEN3_CODER)
QWEN3_CODER_WITHOUT_BLOCK = without_block(_QWEN3_CODER)

_SEED_OSS = replace(_FUNCTION, block_end="</seed:tool_call>")

SEED_OSS = tagged("<seed:tool_call>", _SEED_OSS)
SEED_OSS_WITHOUT_BLOCK = without_block(_SEED_OSS)


def _invoked(closes: str, prefix: str = "") -> TagSyntax:
    """`<invoke name="f"><parameter name="key">value</parameter></invoke>`, in a block."""
    return TagSyntax(
        function=f"<{prefix}invoke name=",
        function_end=f"</{prefix}invoke>",
        parameter=f"<{prefix}parameter name=",
        parameter_end=f"</{prefix}parameter>",
        block_end=closes,
        quote='"',
    )


_MINIMAX_M2 = _invoked("</minimax:tool_call>")
MINIMAX_M2 = tagged("<minimax:tool_call>", _MINIMAX_M2)
MINIMAX_M2_WITHOUT_BLOCK = without_block(_MINIMAX_M2)
_DOTS = _invoked("</dots_function_call>")
DOTS = tagged("<dots_function_call>", _DOTS)
DOTS_WITHOUT_BLOCK = replace(without_block(_DOTS), blocks=())
_MUSE = _invoked("</atem:function_calls>", "atem:")
MUSE = tagged("<atem:function_calls>", _MUSE)
MUSE_WITHOUT_BLOCK = replace(without_block(_MUSE), blocks=())

_STEP3 = TagSyntax(
    before=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
    function="<steptml:invoke name=",
    function_end="</steptml:invoke>",
    after=("<｜tool_call_end｜>",),
    parameter="<steptml:parameter name=",
    parameter_end="</steptml:parameter>",
    block_end="<｜tool_calls_end｜>",
    quote='"',
)
STEP3 = replace(
    tagged("<｜tool_calls_begin｜>", _STEP3),
    inner=(_STEP3.before[0], _STEP3.before[2], *_STEP3.after),
)
STEP3_WITHOUT_BLOCK = tuple(
    replace(each, repairs=("unmarked",), blocks=())
    for each in (
        tagged(_STEP3.before[0], replace(_STEP3, before=_STEP3.before[1:])),
        without_block(_STEP3),
    )
)
STEP3_RESPELLED = tuple(
    replace(tagged(tags.block_end.replace("_end", "_begin"), tags), repairs=("format",), blocks=())
    for tags in respelled(_STEP3)
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
    inner=(
        _MINICPM5_TAGS.parameter,
        _MINICPM5_TAGS.parameter_end,
        _MINICPM5_TAGS.function_end,
    ),
)

MINICPM5_SPACED = replace(
    MINICPM5, opens=(f"{_MINICPM5_TAGS.function[:-1]} =",), repairs=("format",), blocks=()
)

DSML, GCML = "｜DSML｜", "｜GCML｜"
"""The text before the names in DeepSeek's tags, from V3.2 on, and in GigaChat's."""


def _dsml_tags(block: str, sign: str = DSML, gap: str = "") -> TagSyntax:
    """gap: the text between the sign and each name."""
    delimiter = sign + gap
    return TagSyntax(
        function=f"<{delimiter}invoke name=",
        function_end=f"</{delimiter}invoke>",
        parameter=f"<{delimiter}parameter name=",
        parameter_end=f"</{delimiter}parameter>",
        block_end=f"</{delimiter}{block}>",
        quote='"',
        says_types=True,
    )


def _dsml(tags: TagSyntax, sign: str = DSML) -> CallFormat:
    return replace(_in_block(tags), inner=(sign,))


def _in_block(tags: TagSyntax) -> CallFormat:
    return tagged(tags.block_end.replace("/", "", 1), tags)


def _dsml_without_block(tags: TagSyntax) -> CallFormat:
    return replace(without_block(tags), inner=(DSML,), blocks=())


_V32, _V4, _V41 = (
    _dsml_tags("function_calls"),
    _dsml_tags("tool_calls"),
    _dsml_tags("calls", gap=" "),
)
DSML_FORMATS = (*map(_dsml, (_V32, _V4, _V41)), *map(_dsml_without_block, (_V4, _V41)))
"""The formats of V3.2, V4 and V4.1, and V4's without the tags of the block, with which V3.2
agrees."""


def _respelled_dsml(*known: TagSyntax) -> tuple[CallFormat, ...]:
    return tuple(
        replace(call_format, repairs=("format", *call_format.repairs), blocks=())
        for each in known
        for tags in respelled(each)
        for call_format in (_in_block(tags), without_block(tags))
    )


DSML_RESPELLED = _respelled_dsml(_V32, _V4, _V41)
_GIGACHAT35 = _dsml_tags("tool_calls", GCML)
GIGACHAT35 = _dsml(_GIGACHAT35, GCML)
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
