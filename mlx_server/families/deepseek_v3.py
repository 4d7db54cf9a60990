"""DeepSeek V2.5, V3, R1, V3.1, V3.2-Exp and the R1 distils: calls in sections."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.deepseek import (
    DEEPSEEK,
    DEEPSEEK_RESPELLED,
    DEEPSEEK_WITHOUT_SECTION,
)
from mlx_server.tool_parsers.respelled import respelled_delimiter

OUTPUTS = (
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
"""Delimiters around tool results, which models repeat in their answers."""

LAYOUT = MarkupLayout(
    call_formats=(DEEPSEEK, DEEPSEEK_WITHOUT_SECTION),
    inline_formats=lambda tools: DEEPSEEK_RESPELLED,
    transparent=(
        *OUTPUTS,
        *(each for delimiter in OUTPUTS for each in respelled_delimiter(delimiter)),
    ),
    calls_end_reasoning=True,
)

TURNS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)

DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    template_markers=("<｜tool▁calls▁begin｜>",),
    stop_tokens=("<｜end▁of▁sentence｜>",),
    special_tokens=(
        *TURNS,
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        *OUTPUTS,
    ),
)
