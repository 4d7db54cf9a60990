"""Cohere's Command R and R+: an array of calls in a code fence after `Action:`."""

from mlx_server.families.base import ModelFamily
from mlx_server.families.command import END, TURNS
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import COMMAND_R as ACTION

COMMAND_R = ModelFamily(
    name="command_r",
    layout=MarkupLayout(reasoning=(), call_formats=(ACTION,)),
    model_types=("cohere",),
    template_markers=("Action:", "```json"),
    stop_tokens=(END,),
    special_tokens=TURNS,
)
