"""Muse (Glimmer): messages to somebody, thoughts to the model itself, calls as tags."""

from collections.abc import Sequence

from mlx_server.families.base import ModelFamily
from mlx_server.messages import Tool
from mlx_server.parsers.markup.layout import Header, MarkupLayout
from mlx_server.tool_parsers.tag_formats import MUSE as CALLS

START, MESSAGE, END, TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
TURN = f"{START}assistant "
THOUGHTS = (f"to=self{MESSAGE}", END)
NOTES = (f"to=developer{MESSAGE}", END)
"""Messages that no user reads."""
READERS = ("user", "commentary")


def _layout(tools: Sequence[Tool]) -> MarkupLayout:
    to_user = _headers(READERS)
    to_tools = _headers([name for tool in tools for name in _names(tool.name)])
    return MarkupLayout(
        reasoning=(THOUGHTS, NOTES),
        call_formats=(CALLS,),
        dropped=(*to_user, *to_tools, f"{START}assistant", MESSAGE, END, TURN_END),
        literal=to_user,
        header=Header(f"{START}assistant", (MESSAGE,), "to="),
        ends_reasoning=(*to_tools, f"{START}assistant"),
    )


def _headers(readers: Sequence[str]) -> tuple[str, ...]:
    """How messages begin, of which the first one's start may be the end of the prompt."""
    return tuple(f"{start}to={name}{MESSAGE}" for name in readers for start in (TURN, ""))


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
