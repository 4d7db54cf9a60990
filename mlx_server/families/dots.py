"""dots: `<think>`, calls as MiniMax-M2 writes them, but in another block."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.tag_formats import DOTS as CALLS
from mlx_server.tool_parsers.tag_formats import DOTS_WITHOUT_BLOCK

DOTS = ModelFamily(
    name="dots",
    layout=MarkupLayout(call_formats=(CALLS, DOTS_WITHOUT_BLOCK), calls_end_reasoning=True),
    answer_prefix="\n</think>\n\n",
    template_markers=CALLS.opens,
    stop_tokens=("<|endofassistant|>", "<|endofresponse|>"),
    special_tokens=(
        "<|system|>",
        "<|endofsystem|>",
        "<|user|>",
        "<|endofuser|>",
        "<|assistant|>",
        "<|endofassistant|>",
        "<|endofresponse|>",
    ),
)
