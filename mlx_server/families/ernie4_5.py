"""ERNIE 4.5: `<think>`, `<response>`, calls as Hermes writes them."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import HERMES

ERNIE4_5 = ModelFamily(
    name="ernie4_5",
    layout=MarkupLayout(call_formats=(HERMES,), dropped=("<response>", "</response>")),
    answer_prefix="\n</think>\n\n",
    model_types=("ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl", "ernie4_5_vl"),
    stop_tokens=("</s>", "<|im_end|>"),
    special_tokens=(
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<response>",
        "</response>",
        "<tool_call>",
        "</tool_call>",
    ),
)
