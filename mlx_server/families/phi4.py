"""Phi 3 and 4: calls as JSON between `<|tool_call|>` and `<|/tool_call|>`, or after `functools`."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.prompts.history_rendering import as_json_array
from mlx_server.tool_parsers.formats import FUNCTOOLS, FUNCTOOLS_OBJECT
from mlx_server.tool_parsers.formats import PHI4 as CALLS

LAYOUT = MarkupLayout(call_formats=(CALLS, FUNCTOOLS, FUNCTOOLS_OBJECT))

PHI4 = ModelFamily(
    name="phi4",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    write_calls=as_json_array("<|tool_call|>", "<|/tool_call|>"),
    model_types=("phi3", "phi3small", "phimoe", "phi4mm"),
    stop_tokens=("<|end|>", "<|im_end|>", "<|endoftext|>"),
    special_tokens=(
        "<|endoftext|>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|end|>",
        "<|tool|>",
        "<|/tool|>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<|tool_response|>",
        "<|im_start|>",
        "<|im_sep|>",
        "<|im_end|>",
    ),
)
