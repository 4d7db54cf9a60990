"""Qwen2, Qwen2.5 and Qwen3: ChatML, `<think>`, calls as Hermes writes them."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import HERMES

LAYOUT = MarkupLayout(call_formats=(HERMES,))

QWEN3 = ModelFamily(
    name="qwen3",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    model_types=(
        "qwen2",
        "qwen2_moe",
        "qwen2_vl",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
    ),
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    special_tokens=(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ),
)
