"""Functionary v3.2: each message has the header `>>>` and a tool's name, or `all` for text."""

from collections.abc import Sequence

from mlx_server.families.base import ModelFamily
from mlx_server.messages import Tool
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers import line_named_calls

TO_USER = ("all\n", "all \n", "all\r\n")
"""The header of a message to the user, and how models misspell it."""


def _layout(tools: Sequence[Tool]) -> MarkupLayout:
    return MarkupLayout(
        reasoning=(),
        call_formats=line_named_calls.functionary(tools),
        dropped=tuple(f"{opening}{each}" for opening in (">>>", ">>> ") for each in TO_USER),
        leads=TO_USER,
    )


FUNCTIONARY = ModelFamily(
    name="functionary",
    layout=_layout,
    shapes=("", "name ⏎ {…}"),
    template_markers=(">>>all",),
    stop_tokens=("<|eot_id|>",),
    special_tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
)
