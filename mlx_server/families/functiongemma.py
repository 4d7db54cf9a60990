"""FunctionGemma: the model type is that of Gemma 3, but its template has call delimiters."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import FUNCTION_GEMMA as CALLS
from mlx_server.tool_parsers.formats import inline_function_gemma

LAYOUT = MarkupLayout(
    reasoning=(),
    call_formats=(CALLS,),
    inline_formats=inline_function_gemma,
    trims=False,
)

FUNCTION_GEMMA = ModelFamily(
    name="functiongemma",
    layout=LAYOUT,
    model_types=("gemma3", "gemma3_text"),
    template_markers=CALLS.opens,
    stop_tokens=("<end_of_turn>", "<start_function_response>", "<eos>"),
    special_tokens=(
        "<bos>",
        "<eos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_function_declaration>",
        "<end_function_declaration>",
        *CALLS.opens,
        *CALLS.closes,
        "<start_function_response>",
        "<end_function_response>",
        *CALLS.inner,
    ),
)
