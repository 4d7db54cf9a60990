"""Granite 3 and 4: a JSON array behind `<|tool_call|>`, or calls as Hermes writes them."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup import MarkupLayout
from mlx_server.prompts.history_rendering import as_json_array
from mlx_server.tool_parsers.formats import GRANITE as CALLS
from mlx_server.tool_parsers.formats import HERMES

LAYOUT = MarkupLayout(call_formats=(CALLS, HERMES), dropped=("<response>", "</response>"))

GRANITE = ModelFamily(
    name="granite",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    write_calls=as_json_array("<|tool_call|>"),
    model_types=("granite", "granitemoe", "granitemoehybrid", "granitemoeshared"),
    stop_tokens=("<|end_of_text|>",),
    special_tokens=(
        "<|start_of_role|>",
        "<|end_of_role|>",
        "<|end_of_text|>",
        "<|tool_call|>",
    ),
)
