"""GLM-4.5 and later, and the earlier GLM-4, whose calls have no delimiters."""

from collections.abc import Sequence

from mlx_server.families.base import ModelFamily
from mlx_server.messages import Tool
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers import line_named_calls
from mlx_server.tool_parsers.glm import GLM

TURN = "<|assistant|>"
"""The header of every answer, which models repeat; a line break follows it."""

BOX = ("<|begin_of_box|>", "<|end_of_box|>")
"""Delimiters around the final answer of vision models."""

LAYOUT = MarkupLayout(
    call_formats=(GLM,),
    dropped=(TURN,),
    transparent=BOX,
    stutters=True,
    calls_end_reasoning=True,
)


def _without_delimiters(tools: Sequence[Tool]) -> MarkupLayout:
    formats = line_named_calls.glm4(tools)
    return MarkupLayout(call_formats=formats, dropped=(TURN,), transparent=BOX)


STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
TURNS = (*STOPS, "[gMASK]", "<sop>", "<|system|>", TURN)

GLM4_5 = ModelFamily(
    name="glm4_5",
    layout=LAYOUT,
    answer_prefix="</think>",
    model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm4v_moe", "laguna"),
    stop_tokens=STOPS,
    special_tokens=(
        *TURNS,
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<tool_response>",
        "</tool_response>",
        *BOX,
    ),
)

GLM4 = ModelFamily(
    name="glm4",
    layout=_without_delimiters,
    shapes=("<think>…</think>", "name ⏎ {…}"),
    answer_prefix="</think>",
    model_types=("chatglm", "glm", "glm4", "glm4v"),
    stop_tokens=STOPS,
    special_tokens=(*TURNS, *BOX),
)
