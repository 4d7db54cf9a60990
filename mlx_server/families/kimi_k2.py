"""Kimi K2, K2 Thinking, K2.5 and K2.6: calls in a section, `<think>` in those that think."""

import re

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import THINK, MarkupLayout
from mlx_server.tool_parsers.formats import KIMI_K2 as CALLS
from mlx_server.tool_parsers.formats import KIMI_K2_SINGULAR
from mlx_server.tool_parsers.formats import KIMI_K2_WITHOUT_SECTION as WITHOUT_SECTION

ID = re.compile(r"functions\.[^\s:]+:\d+")


def numbered_call_id(id: str, name: str, number: int) -> str:
    """The call's id as the model writes it, by the number of the call within the conversation."""
    return id if ID.fullmatch(id) or not name else f"functions.{name}:{number}"


# white space is not trimmed, since the template writes none between reasoning, text and calls
LAYOUT = MarkupLayout(
    call_formats=(CALLS, WITHOUT_SECTION, KIMI_K2_SINGULAR),
    trims=False,
    calls_end_reasoning=True,
)

KIMI_K2 = ModelFamily(
    name="kimi_k2",
    layout=LAYOUT,
    answer_prefix=THINK[1],
    call_id=numbered_call_id,
    model_types=("kimi_k2", "kimi_k25", "kimi_linear"),
    stop_tokens=("<|im_end|>", "[EOS]"),
    special_tokens=(
        "[BOS]",
        "[EOS]",
        "<|im_end|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        *CALLS.opens,
        *WITHOUT_SECTION.opens,
        "<|tool_call_argument_begin|>",
        *CALLS.closes,
        *THINK,
    ),
)
