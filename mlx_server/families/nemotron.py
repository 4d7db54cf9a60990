"""NVIDIA's Nemotrons: `<think>`, JSON calls in `<TOOLCALL>`; Nemotron 3 calls as Qwen3-Coder."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import NEMOTRON as CALLS
from mlx_server.tool_parsers.tag_formats import QWEN3_CODER, QWEN3_CODER_WITHOUT_BLOCK

NEMOTRON = ModelFamily(
    name="nemotron",
    layout=MarkupLayout(call_formats=(CALLS,)),
    answer_prefix="\n</think>\n\n",
    template_markers=CALLS.opens,  # their model types are also those of other families
    stop_tokens=("<|eot_id|>", "<SPECIAL_12>"),
    special_tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<SPECIAL_10>",
        "<SPECIAL_11>",
        "<SPECIAL_12>",
    ),
)

LAYOUT_3 = MarkupLayout(
    call_formats=(QWEN3_CODER, QWEN3_CODER_WITHOUT_BLOCK), calls_end_reasoning=True
)

NEMOTRON3 = ModelFamily(
    name="nemotron3",
    layout=LAYOUT_3,
    answer_prefix="\n</think>\n\n",
    model_types=("nemotron_h",),
    template_markers=("<function=",),
    stop_tokens=("<|im_end|>",),
    special_tokens=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
)
