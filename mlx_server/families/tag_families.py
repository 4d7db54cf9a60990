"""Families whose models write calls as tags, or as pairs of keys and values."""

from collections.abc import Sequence
from dataclasses import replace

from mlx_server.families.base import spelled
from mlx_server.families.json_families import GIGACHAT_ENDS, GIGACHAT_SEPARATORS, QWEN3
from mlx_server.families.markup import MarkupFamily
from mlx_server.families.named_families import (
    DEEPSEEK_TURNS,
    GLM_BOX,
    GLM_STOPS,
    GLM_TURN,
    GLM_TURNS,
)
from mlx_server.messages import Tool
from mlx_server.parsers.markup_layout import Header, MarkupLayout
from mlx_server.parsers.parse_context import THINK
from mlx_server.tool_parsers import elements, keyed_calls, tag_formats
from mlx_server.tool_parsers.formats import LONGCAT_JSON

_QWEN3_CODER = MarkupLayout(
    call_formats=(tag_formats.QWEN3_CODER, tag_formats.QWEN3_CODER_WITHOUT_BLOCK),
    calls_end_reasoning=True,
)
QWEN3_CODER = MarkupFamily(  # and any Qwen3 whose template shows the format
    "qwen3_coder",
    _QWEN3_CODER,
    model_types=("qwen3", "qwen3_moe", "qwen3_next"),
    template_markers=("<function=",),
    stop_tokens=QWEN3.stop_tokens,
    special_tokens=QWEN3.special_tokens,
)
QWEN3_5 = replace(  # and later
    QWEN3_CODER,
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    template_markers=(),
)
STEP3_5 = replace(  # writes a call again where it should have stopped
    QWEN3_5,
    name="step3_5",
    layout=replace(_QWEN3_CODER, stutters=True),
    model_types=("step3p5",),
)
NEMOTRON3 = MarkupFamily(
    "nemotron3",
    _QWEN3_CODER,
    model_types=("nemotron_h",),
    template_markers=("<function=",),
    stop_tokens=("<|im_end|>",),
    special_tokens=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
)

_SEED = "<seed:think>"
_BUDGET, _BUDGET_END = "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"
SEED_OSS = MarkupFamily(
    "seed_oss",
    # with a thinking budget of 0 the prompt ends within a reflection, which the second pair opens
    MarkupLayout(
        ((_SEED, "</seed:think>"), (_SEED + _BUDGET, "</seed:think>")),
        call_formats=(tag_formats.SEED_OSS, tag_formats.SEED_OSS_WITHOUT_BLOCK),
        calls_end_reasoning=True,
    ),
    answer_prefix="</seed:think>",
    model_types=("seed_oss",),
    stop_tokens=("<seed:eos>",),
    special_tokens=(
        *("<seed:bos>", "<seed:eos>", "<seed:pad>", _SEED, "</seed:think>"),
        *(_BUDGET, _BUDGET_END, "<seed:tool_call>", "</seed:tool_call>"),
    ),
)

_MINIMAX_TURNS = ("]~!b[", "]~b]", "[e~[")
MINIMAX_M2 = MarkupFamily(
    "minimax_m2",
    MarkupLayout(
        call_formats=(tag_formats.MINIMAX_M2, tag_formats.MINIMAX_M2_WITHOUT_BLOCK),
        calls_end_reasoning=True,
    ),
    model_types=("minimax", "minimax_m2"),
    stop_tokens=("[e~[",),
    special_tokens=(*_MINIMAX_TURNS, *THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
)
MINIMAX_M3 = MarkupFamily(  # a special token stands before each tag of a call
    "minimax_m3",
    MarkupLayout(
        (("<mm:think>", "</mm:think>"),),
        call_formats=(elements.MINIMAX_M3, elements.MINIMAX_M3_WITHOUT_BLOCK),
        calls_end_reasoning=True,
    ),
    answer_prefix="</mm:think>",
    model_types=("minimax_m3", "minimax_m3_vl", "minimax_m3_text"),
    stop_tokens=("[e~[",),
    special_tokens=(
        *(*_MINIMAX_TURNS, "<mm:think>", "</mm:think>", elements.SIGN),
        *("<tool_call>", "</tool_call>"),
    ),
)
DOTS = MarkupFamily(  # as MiniMax-M2, but in another block
    "dots",
    MarkupLayout(
        call_formats=(tag_formats.DOTS, tag_formats.DOTS_WITHOUT_BLOCK), calls_end_reasoning=True
    ),
    template_markers=tag_formats.DOTS.opens,
    stop_tokens=("<|endofassistant|>", "<|endofresponse|>"),
    special_tokens=spelled(
        "<|system|> <|endofsystem|> <|user|> <|endofuser|> <|assistant|> <|endofassistant|> "
        "<|endofresponse|>"
    ),
)
DEEPSEEK_V32 = MarkupFamily(  # V3.2, V4 and V4.1: DSML
    "deepseek_v32",
    MarkupLayout(
        call_formats=tag_formats.DSML_FORMATS,
        inline_formats=lambda tools: tag_formats.DSML_RESPELLED,
        calls_end_reasoning=True,
    ),
    answer_prefix="</think>",
    model_types=("deepseek_v32", "deepseek_v4", "deepseek_v41"),
    stop_tokens=("<｜end▁of▁sentence｜>",),
    special_tokens=(*DEEPSEEK_TURNS, tag_formats.DSML),
)
GIGACHAT35 = MarkupFamily(
    "gigachat35",
    MarkupLayout(
        call_formats=(tag_formats.GIGACHAT35, tag_formats.GIGACHAT35_WITHOUT_BLOCK),
        inline_formats=lambda tools: tag_formats.GIGACHAT35_RESPELLED,
        dropped=GIGACHAT_ENDS,
    ),
    template_markers=("｜GCML｜",),
    stop_tokens=("</s>",),
    special_tokens=("<s>", "</s>", *GIGACHAT_SEPARATORS, "｜GCML｜"),
)
STEP3 = MarkupFamily(
    "step3",
    MarkupLayout(
        call_formats=(tag_formats.STEP3,),
        inline_formats=lambda tools: (
            *tag_formats.STEP3_WITHOUT_BLOCK,
            *tag_formats.STEP3_RESPELLED,
        ),
        calls_end_reasoning=True,
    ),
    model_types=("step3", "step3_text", "step3_vl"),
    stop_tokens=("<|EOT|>",),
    special_tokens=spelled(
        "<｜begin▁of▁sentence｜> <|BOT|> <|EOT|> <｜tool_calls_begin｜> <｜tool_calls_end｜> "
        "<｜tool_call_begin｜> <｜tool_call_end｜> <｜tool_sep｜>"
    ),
)
MINICPM5 = MarkupFamily(
    "minicpm5",
    MarkupLayout(call_formats=(tag_formats.MINICPM5, tag_formats.MINICPM5_SPACED)),
    template_markers=("<function name=", "<param name="),
    stop_tokens=("<|im_end|>", "</s>"),
    special_tokens=(
        *("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        *("<function", "</function>", "<param", "</param>"),
    ),
)

_START, _MESSAGE, _END, _TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"


def _muse(tools: Sequence[Tool]) -> MarkupLayout:
    to_user = _headers(("user", "commentary"))
    to_tools = _headers([name for tool in tools for name in _recipients(tool.name)])
    return MarkupLayout(
        # messages to the developer are reasoning for a client
        ((f"to=self{_MESSAGE}", _END), (f"to=developer{_MESSAGE}", _END)),
        call_formats=(tag_formats.MUSE, tag_formats.MUSE_WITHOUT_BLOCK),
        dropped=(*to_user, *to_tools, f"{_START}assistant", _MESSAGE, _END, _TURN_END),
        literal=to_user,
        header=Header(f"{_START}assistant", (_MESSAGE,), "to="),
        ends_reasoning=(*to_tools, f"{_START}assistant"),
    )


def _headers(readers: Sequence[str]) -> tuple[str, ...]:
    """The headers of messages to these recipients, with and without the start of the turn, which
    for the first message may be in the prompt."""
    starts = (f"{_START}assistant ", "")
    return tuple(f"{start}to={name}{_MESSAGE}" for name in readers for start in starts)


def _recipients(tool: str) -> tuple[str, ...]:
    """The recipients that mean this tool. The template says that a tool without a namespace has its
    own name as namespace."""
    return tool, f"{tool}.{tool}", f"functions.{tool}"


MUSE = MarkupFamily(  # Muse (Glimmer): each message has a recipient
    "muse",
    _muse,
    answer_prefix=f"{_END}{_START}assistant to=user{_MESSAGE}",
    template_markers=tag_formats.MUSE.opens,
    stop_tokens=(_TURN_END,),
    special_tokens=(_START, _MESSAGE, _END, _TURN_END),
)

KIMI_K3 = MarkupFamily(  # an answer has the elements `think`, `response` and `tools`, in this order
    "kimi_k3",
    MarkupLayout(
        ((elements.beginning("think"), elements.end("think")),),
        call_formats=(elements.KIMI_K3,),
        inline_formats=lambda tools: (elements.KIMI_K3_SPACED, elements.KIMI_K3_CALLS),
        dropped=(
            *(elements.beginning("response"), elements.end("response"), elements.end("message")),
            *elements.spaced(elements.OPEN, "response"),
            *elements.spaced(elements.CLOSE, "response"),
            *elements.spaced(elements.CLOSE, "message"),
        ),
        halves=(elements.OPEN, elements.CLOSE),
        worded_reasoning=tuple(
            (opening, elements.end("think")) for opening in elements.spaced(elements.OPEN, "think")
        ),
        trims=False,
        calls_end_reasoning=True,
        ends_reasoning=(
            *(elements.beginning("response"), elements.end("message")),
            *elements.spaced(elements.CLOSE, "think"),
            *elements.spaced(elements.OPEN, "response"),
            *elements.spaced(elements.CLOSE, "message"),
        ),
    ),
    answer_prefix=elements.end("think") + elements.beginning("response"),
    model_types=("kimi_k3",),
    stop_tokens=("<|end_of_msg|>", "[EOS]"),
    special_tokens=(
        *("[BOS]", "[EOS]", elements.OPEN, elements.CLOSE, elements.SEPARATOR, "<|end_of_msg|>"),
    ),
)

# Pairs of keys and values

GLM4_5 = MarkupFamily(  # and later
    "glm4_5",
    MarkupLayout(
        call_formats=(keyed_calls.GLM,),
        dropped=(GLM_TURN,),
        transparent=GLM_BOX,
        stutters=True,
        calls_end_reasoning=True,
    ),
    answer_prefix="</think>",
    model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm4v_moe", "laguna"),
    stop_tokens=GLM_STOPS,
    special_tokens=(
        *GLM_TURNS,
        *spelled("<think> </think> <tool_call> </tool_call> <arg_key> </arg_key>"),
        *spelled("<arg_value> </arg_value> <tool_response> </tool_response>"),
        *GLM_BOX,
    ),
)

_HY3_THOUGHTS = ("<think:opensource>", "</think:opensource>")
_SUFFIXED = tag_formats.HY3_OPEN_SOURCE
HY3 = MarkupFamily(  # all delimiters have a suffix, or none has
    "hy3",
    MarkupLayout(
        (_HY3_THOUGHTS, THINK),
        call_formats=(_SUFFIXED, tag_formats.HY3, *tag_formats.HY3_ALONE),
        calls_end_reasoning=True,
    ),
    answer_prefix=_HY3_THOUGHTS[1],
    model_types=("hy_v3", "hy3"),
    stop_tokens=("<｜hy_eos:opensource｜>", "<｜hy_eos｜>"),
    special_tokens=(
        *spelled("<｜hy_begin_of_sentence:opensource｜> <｜hy_eos:opensource｜> <｜hy_eos｜>"),
        *spelled("<｜hy_User:opensource｜> <｜hy_Assistant:opensource｜>"),
        *("<｜reasoning_mode:opensource｜>", *_HY3_THOUGHTS),
        *(*_SUFFIXED.opens, *_SUFFIXED.inner, *_SUFFIXED.closes),
        *spelled("<tool_responses:opensource> </tool_responses:opensource>"),
        *spelled("<tool_response:opensource> </tool_response:opensource>"),
    ),
)

_IFM_THOUGHTS = tuple(
    (f"<ifm|{name}>", f"</ifm|{name}>") for name in ("think", "think_fast", "think_faster")
)
_IFM_CALLS = tag_formats.K2_HORIZON
K2_HORIZON = MarkupFamily(  # three pairs of thinking tags for three efforts
    "k2_horizon",
    MarkupLayout(
        _IFM_THOUGHTS,
        call_formats=(_IFM_CALLS,),
        inline_formats=lambda tools: (tag_formats.K2_HORIZON_ALONE,),
    ),
    answer_prefix=_IFM_THOUGHTS[0][1],
    template_markers=_IFM_CALLS.opens,
    stop_tokens=("<|ifm|im_end|>", "<|ifm|endoftext|>"),
    special_tokens=(
        *spelled("<|ifm|begin_of_text|> <|ifm|endoftext|> <|ifm|im_start|> <|ifm|im_end|>"),
        *(delimiter for pair in _IFM_THOUGHTS for delimiter in pair),
        *(*_IFM_CALLS.opens, *_IFM_CALLS.inner, *_IFM_CALLS.closes),
    ),
)

_LONGCAT_THOUGHTS = ("<longcat_think>", "</longcat_think>")
_LONGCAT_CALLS = replace(  # in JSON or in tags
    tag_formats.LONGCAT,
    blocks=(*LONGCAT_JSON.blocks, *tag_formats.LONGCAT.blocks),
    repair=LONGCAT_JSON.repair,
)
LONGCAT = MarkupFamily(
    "longcat",
    MarkupLayout((_LONGCAT_THOUGHTS,), call_formats=(_LONGCAT_CALLS,)),
    answer_prefix=_LONGCAT_THOUGHTS[1],
    model_types=("longcat_flash", "longcat_flash_ngram"),
    stop_tokens=("</longcat_s>",),
    special_tokens=(
        *spelled("<longcat_s> </longcat_s> <longcat_system> <longcat_user> <longcat_assistant>"),
        *(*_LONGCAT_THOUGHTS, *_LONGCAT_CALLS.opens, *_LONGCAT_CALLS.closes),
    ),
)

SOLAR_OPEN2 = MarkupFamily(
    "solar_open2",
    MarkupLayout((("<|think:start|>", "<|think:end|>"),), call_formats=(tag_formats.SOLAR_OPEN2,)),
    answer_prefix="<|think:end|>",
    model_types=("solar_open2",),
    stop_tokens=("<|im:end|>",),
    special_tokens=(
        *spelled("<|im:start|> <|im:content|> <|im:end|> <|think:start|> <|think:end|>"),
        *tag_formats.SOLAR_OPEN2.inner,
        *spelled("<|tool:start|> <|tool:end|> <|tool_response:start|> <|tool_response:end|>"),
    ),
)
