"""Llama 4: headers; calls as Python, with or without delimiters, or as JSON."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import BARE_JSON, BARE_PYTHON, LLAMA4_PYTHON, inline_python

LAYOUT = MarkupLayout(
    call_formats=(BARE_JSON, BARE_PYTHON, LLAMA4_PYTHON),
    inline_formats=inline_python,
    trims_text=False,
)

LLAMA4 = ModelFamily(
    name="llama4",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    model_types=("llama4", "llama4_text"),
    stop_tokens=("<|eot|>", "<|eom|>", "<|end_of_text|>"),
    special_tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|header_start|>",
        "<|header_end|>",
        "<|eom|>",
        "<|eot|>",
        "<|python_start|>",
        "<|python_end|>",
    ),
)
