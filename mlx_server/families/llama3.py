"""Llama 3 to 3.3: headers, and calls in any of Meta's formats, depending on the prompt."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import (
    BARE_JSON,
    BARE_PYTHON,
    LLAMA_FUNCTION,
    LLAMA_TAGGED,
    inline_python,
)

LAYOUT = MarkupLayout(
    call_formats=(BARE_JSON, BARE_PYTHON, LLAMA_TAGGED, LLAMA_FUNCTION),
    inline_formats=inline_python,
    trims_text=False,
)

LLAMA3 = ModelFamily(
    name="llama3",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    model_types=("llama", "mllama"),
    stop_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    special_tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
)
