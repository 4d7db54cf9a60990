"""Apriel: reasoning that begins with a sentence and ends with a delimiter, then an array of calls
in `<tool_calls>`."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import TOOL_CALLS

OPENING, ANSWER, ANSWER_END = (
    "Here are my reasoning steps:",
    "[BEGIN FINAL RESPONSE]",
    "[END FINAL RESPONSE]",
)

APRIEL = ModelFamily(
    name="apriel",
    layout=MarkupLayout(
        reasoning=((OPENING, ANSWER), ("<thinking>", "</thinking>")),
        call_formats=(TOOL_CALLS,),
        dropped=(ANSWER_END,),
        calls_end_reasoning=True,
    ),
    answer_prefix=f"\n{ANSWER}\n",
    template_markers=(ANSWER,),
    stop_tokens=("<|end|>",),
    special_tokens=(
        "<s>",
        "<|end|>",
        "<|begin_system|>",
        "<|begin_user|>",
        "<|begin_assistant|>",
        "<|begin_tool_result|>",
    ),
)
