"""EXAONE 4: roles in `[|...|]`, `<think>`, calls as Hermes writes them."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import HERMES

LAYOUT = MarkupLayout(call_formats=(HERMES,))

EXAONE4 = ModelFamily(
    name="exaone4",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    model_types=("exaone4", "exaone_moe"),
    stop_tokens=("[|endofturn|]",),
    special_tokens=(
        "[BOS]",
        "[|endofturn|]",
        "[|system|]",
        "[|user|]",
        "[|assistant|]",
        "[|tool|]",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ),
)
