"""Apertus: delimiters for every part; a call is an object of the tool's name and its arguments."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import APERTUS as CALLS

THOUGHTS = ("<|inner_prefix|>", "<|inner_suffix|>")

APERTUS = ModelFamily(
    name="apertus",
    layout=MarkupLayout(reasoning=(THOUGHTS,), call_formats=(CALLS,)),
    answer_prefix=THOUGHTS[1],
    model_types=("apertus",),
    stop_tokens=("<|assistant_end|>",),
    special_tokens=(
        "<s>",
        "</s>",
        "<|system_start|>",
        "<|system_end|>",
        "<|developer_start|>",
        "<|developer_end|>",
        "<|user_start|>",
        "<|user_end|>",
        "<|assistant_start|>",
        "<|assistant_end|>",
        *THOUGHTS,
        *CALLS.opens,
        *CALLS.closes,
    ),
)
