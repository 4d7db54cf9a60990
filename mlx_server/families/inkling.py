"""Inkling: each message has either thoughts, text or a call."""

from collections.abc import Sequence

from mlx_server.families.base import ModelFamily
from mlx_server.messages import Tool
from mlx_server.parsers.markup.layout import Header, MarkupLayout
from mlx_server.tool_parsers.formats import INKLING as CALLS

START, TEXT, END, TURN_END = (
    "<|message_model|>",
    "<|content_text|>",
    "<|end_message|>",
    "<|content_model_end_sampling|>",
)
THOUGHTS = ("<|content_thinking|>", END)


def _layout(tools: Sequence[Tool]) -> MarkupLayout:
    named = tuple(f"{START}{tool.name}" for tool in tools)
    return MarkupLayout(
        reasoning=(THOUGHTS,),
        call_formats=(CALLS,),
        dropped=(START, *named, TEXT, END, TURN_END),
        header=Header(START, CALLS.opens),
    )


INKLING = ModelFamily(
    name="inkling",
    layout=_layout,
    answer_prefix=f"{END}{START}{TEXT}",
    template_markers=CALLS.opens,
    stop_tokens=(TURN_END,),
    special_tokens=(
        "<|message_system|>",
        "<|message_user|>",
        "<|message_tool|>",
        START,
        TEXT,
        "<|content_xml|>",
        THOUGHTS[0],
        *CALLS.opens,
        END,
        TURN_END,
    ),
)
