"""Hy3: `<think>`, calls of keys and values; all delimiters have a suffix, or none has."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import THINK, MarkupLayout
from mlx_server.tool_parsers.tag_formats import HY3 as CALLS
from mlx_server.tool_parsers.tag_formats import HY3_ALONE
from mlx_server.tool_parsers.tag_formats import HY3_OPEN_SOURCE as SUFFIXED

THOUGHTS = ("<think:opensource>", "</think:opensource>")

HY3 = ModelFamily(
    name="hy3",
    layout=MarkupLayout(
        reasoning=(THOUGHTS, THINK),
        call_formats=(SUFFIXED, CALLS, *HY3_ALONE),
        calls_end_reasoning=True,
    ),
    answer_prefix=THOUGHTS[1],
    model_types=("hy_v3", "hy3"),
    stop_tokens=("<｜hy_eos:opensource｜>", "<｜hy_eos｜>"),
    special_tokens=(
        "<｜hy_begin_of_sentence:opensource｜>",
        "<｜hy_eos:opensource｜>",
        "<｜hy_eos｜>",
        "<｜hy_User:opensource｜>",
        "<｜hy_Assistant:opensource｜>",
        "<｜reasoning_mode:opensource｜>",
        *THOUGHTS,
        *SUFFIXED.opens,
        *SUFFIXED.inner,
        *SUFFIXED.closes,
        "<tool_responses:opensource>",
        "</tool_responses:opensource>",
        "<tool_response:opensource>",
        "</tool_response:opensource>",
    ),
)
