"""MiniCPM 3 and 4, which write calls as Python, and 5, which writes them in tags."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import THINK, MarkupLayout
from mlx_server.tool_parsers.formats import MINICPM as CALLS
from mlx_server.tool_parsers.tag_formats import MINICPM5 as TAGGED
from mlx_server.tool_parsers.tag_formats import MINICPM5_SPACED

THOUGHTS = ("<|thought_start|>", "<|thought_end|>")

MINICPM = ModelFamily(
    name="minicpm",
    layout=MarkupLayout(reasoning=(THINK, THOUGHTS), call_formats=(CALLS,)),
    answer_prefix="\n</think>\n\n",
    model_types=("minicpm", "minicpm3", "minicpm4"),
    stop_tokens=("<|im_end|>", "</s>"),
    special_tokens=(
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        *THOUGHTS,
        *CALLS.opens,
        *CALLS.closes,
    ),
)

MINICPM5 = ModelFamily(
    name="minicpm5",
    layout=MarkupLayout(call_formats=(TAGGED, MINICPM5_SPACED)),
    answer_prefix="\n</think>\n\n",
    template_markers=("<function name=", "<param name="),
    stop_tokens=("<|im_end|>", "</s>"),
    special_tokens=(
        *("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        *("<function", "</function>", "<param", "</param>"),
    ),
)
