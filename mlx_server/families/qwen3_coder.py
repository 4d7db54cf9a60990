"""Qwen3-Coder, and any Qwen3 whose template shows its format: calls with XML-like parameters."""

from mlx_server.families.base import ModelFamily
from mlx_server.families.qwen3 import QWEN3
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.tag_formats import QWEN3_CODER as CALLS
from mlx_server.tool_parsers.tag_formats import QWEN3_CODER_WITHOUT_BLOCK

LAYOUT = MarkupLayout(call_formats=(CALLS, QWEN3_CODER_WITHOUT_BLOCK), calls_end_reasoning=True)

QWEN3_CODER = ModelFamily(
    name="qwen3_coder",
    layout=LAYOUT,
    answer_prefix=QWEN3.answer_prefix,
    model_types=("qwen3", "qwen3_moe", "qwen3_next"),
    template_markers=("<function=",),
    stop_tokens=QWEN3.stop_tokens,
    special_tokens=QWEN3.special_tokens,
)
