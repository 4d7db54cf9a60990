"""MiniMax-M2: turns between `]~b]` and `[e~[`, `<think>`, calls as `<invoke>`."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.tag_formats import MINIMAX_M2 as CALLS
from mlx_server.tool_parsers.tag_formats import MINIMAX_M2_WITHOUT_BLOCK

LAYOUT = MarkupLayout(call_formats=(CALLS, MINIMAX_M2_WITHOUT_BLOCK), calls_end_reasoning=True)

MINIMAX_M2 = ModelFamily(
    name="minimax_m2",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    model_types=("minimax", "minimax_m2"),
    stop_tokens=("[e~[",),
    special_tokens=(
        "]~!b[",
        "]~b]",
        "[e~[",
        "<think>",
        "</think>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
    ),
)
