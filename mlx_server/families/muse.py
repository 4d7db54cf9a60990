"""Muse (Glimmer): messages to somebody, thoughts to the model itself, calls as tags."""

from collections.abc import Sequence

from mlx_server.families.base import ModelFamily
from mlx_server.messages import Tool
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.tag_formats import MUSE as CALLS

START, MESSAGE, END, TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
THOUGHTS = (f"to=self{MESSAGE}", END)


def _layout(tools: Sequence[Tool]) -> MarkupLayout:
    names = [name for tool in tools for name in _names(tool.name)]
    headers = [f"to={name}{MESSAGE}" for name in ("user", *names)]
    turns = [f"{START}assistant {header}" for header in headers]
    return MarkupLayout(
        reasoning=(THOUGHTS,),
        call_formats=(CALLS,),
        dropped=(*turns, f"{START}assistant", *headers, MESSAGE, END, TURN_END),
    )


def _names(tool: str) -> tuple[str, ...]:
    """The names that address a message to a tool. The template tells the model that a tool without
    a namespace is one itself."""
    return tool, f"{tool}.{tool}", f"functions.{tool}"


MUSE = ModelFamily(
    name="muse",
    layout=_layout,
    answer_prefix=f"{END}{START}assistant to=user{MESSAGE}",
    template_markers=CALLS.opens,
    stop_tokens=(TURN_END,),
    special_tokens=(START, MESSAGE, END, TURN_END),
)
