"""Jamba: turns between control tokens, an array of calls in `<tool_calls>`."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.prompts.history_rendering import as_json_array
from mlx_server.tool_parsers.formats import TOOL_CALLS

JAMBA = ModelFamily(
    name="jamba",
    layout=MarkupLayout(call_formats=(TOOL_CALLS,)),
    answer_prefix="\n</think>\n\n",
    write_calls=as_json_array(*TOOL_CALLS.opens, *TOOL_CALLS.closes),
    model_types=("jamba",),
    stop_tokens=("<|eom|>", "<|endoftext|>"),
    special_tokens=(
        "<|startoftext|>",
        "<|endoftext|>",
        "<|bom|>",
        "<|eom|>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|tool|>",
        "<tool_definitions>",
        "</tool_definitions>",
        *TOOL_CALLS.opens,
        *TOOL_CALLS.closes,
    ),
)
