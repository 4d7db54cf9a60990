"""openPangu: reserved tokens as delimiters of thoughts and of an array of calls."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import PANGU as CALLS

THOUGHTS = ("[unused16]", "[unused17]")

PANGU = ModelFamily(
    name="pangu",
    layout=MarkupLayout(reasoning=(THOUGHTS,), call_formats=(CALLS,)),
    answer_prefix=THOUGHTS[1],
    template_markers=CALLS.opens,
    stop_tokens=("[unused10]",),
    special_tokens=("<s>", "[unused9]", "[unused10]", *CALLS.opens, *CALLS.closes, *THOUGHTS),
)
