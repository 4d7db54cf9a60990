"""The call formats whose calls and arguments stand in tags."""

from dataclasses import replace

from mlx_server.tool_parsers.call_format import CallFormat, respelled
from mlx_server.tool_parsers.keyed_calls import keyed_calls
from mlx_server.tool_parsers.named_calls import NamedCallFormat
from mlx_server.tool_parsers.tags import TagSyntax, tagged, without_block

_FUNCTION = TagSyntax("<function=", "</function>", "<parameter=", "</parameter>")
_QWEN3_CODER = replace(_FUNCTION, block="<tool_call>", block_end="</tool_call>", margin="\n")

QWEN3_CODER, QWEN3_CODER_WITHOUT_BLOCK = tagged(_QWEN3_CODER), without_block(_QWEN3_CODER)

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


DSML_RESPELLED = _respelled_dsml(*_DSML)
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
