"""Granite 3 and 4: a JSON array after `<|tool_call|>`, or calls as Hermes writes them.

Granite 3.2 begins and ends its thoughts with sentences, 3.3 and later with tags.
"""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.prompts.history_rendering import as_json_array
from mlx_server.tool_parsers.formats import GRANITE as CALLS
from mlx_server.tool_parsers.formats import HERMES

WORDED = tuple(
    (f"{here} my thought process:", f"{here} my response:") for here in ("Here is", "Here's")
)

LAYOUT = MarkupLayout(
    call_formats=(CALLS, HERMES),
    dropped=("<response>", "</response>"),
    worded_reasoning=WORDED,
)

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
