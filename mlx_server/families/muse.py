"""Muse (Glimmer): each message has a recipient; thoughts go to the model itself, calls to tools."""

from collections.abc import Sequence

from mlx_server.families.base import ModelFamily
from mlx_server.messages import Tool
from mlx_server.parsers.markup.layout import Header, MarkupLayout
from mlx_server.tool_parsers.tag_formats import MUSE as CALLS
from mlx_server.tool_parsers.tag_formats import MUSE_WITHOUT_BLOCK

START, MESSAGE, END, TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
TURN = f"{START}assistant "
THOUGHTS = (f"to=self{MESSAGE}", END)
NOTES = (f"to=developer{MESSAGE}", END)
"""The delimiters of messages to the developer, which are reasoning for a client."""
READERS = ("user", "commentary")


def _layout(tools: Sequence[Tool]) -> MarkupLayout:
    to_user = _headers(READERS)
    to_tools = _headers([name for tool in tools for name in _recipients(tool.name)])
    return MarkupLayout(
        reasoning=(THOUGHTS, NOTES),
        call_formats=(CALLS, MUSE_WITHOUT_BLOCK),
        dropped=(*to_user, *to_tools, f"{START}assistant", MESSAGE, END, TURN_END),
        literal=to_user,
        header=Header(f"{START}assistant", (MESSAGE,), "to="),
        ends_reasoning=(*to_tools, f"{START}assistant"),
    )


def _headers(readers: Sequence[str]) -> tuple[str, ...]:
    """The headers of messages to these recipients, with and without the start of the turn, which
    for the first message may be in the prompt."""
    return tuple(f"{start}to={name}{MESSAGE}" for name in readers for start in (TURN, ""))


def _recipients(tool: str) -> tuple[str, ...]:
    """The recipients that mean this tool. The template says that a tool without a namespace has its
    own name as namespace."""
    return tool, f"{tool}.{tool}", f"functions.{tool}"


MUSE = ModelFamily(
    name="muse",
    layout=_layout,
    answer_prefix=f"{END}{START}assistant to=user{MESSAGE}",
    template_markers=CALLS.opens,
    stop_tokens=(TURN_END,),
    special_tokens=(START, MESSAGE, END, TURN_END),
)
