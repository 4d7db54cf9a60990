"""SmolLM3: ChatML, `<think>`, calls as Hermes writes them."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import HERMES

LAYOUT = MarkupLayout(call_formats=(HERMES,))

SMOLLM3 = ModelFamily(
    name="smollm3",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    model_types=("smollm3",),
    stop_tokens=("<|im_end|>", "<|end_of_text|>"),
    special_tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ),
)
