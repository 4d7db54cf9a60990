"""MiniMax-M3: like M2, but with `<mm:think>` and with a special token before each tag of a call."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.elements import MINIMAX_M3 as CALLS
from mlx_server.tool_parsers.elements import MINIMAX_M3_WITHOUT_BLOCK

THOUGHTS = ("<mm:think>", "</mm:think>")

MINIMAX_M3 = ModelFamily(
    name="minimax_m3",
    layout=MarkupLayout(
        reasoning=(THOUGHTS,),
        call_formats=(CALLS, MINIMAX_M3_WITHOUT_BLOCK),
        calls_end_reasoning=True,
    ),
    answer_prefix=THOUGHTS[1],
    model_types=("minimax_m3", "minimax_m3_vl", "minimax_m3_text"),
    stop_tokens=("[e~[",),
    special_tokens=(
        "]~!b[",
        "]~b]",
        "[e~[",
        *THOUGHTS,
        *CALLS.inner,
        "<tool_call>",
        "</tool_call>",
    ),
)
