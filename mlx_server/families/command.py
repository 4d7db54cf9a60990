"""Cohere's Command R7B and A: every part of an answer has delimiters of its own."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import COMMAND as ACTION

END = "<|END_OF_TURN_TOKEN|>"
TURNS = (
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    END,
    "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)
THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")
RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

LAYOUT = MarkupLayout(reasoning=(THINKING,), call_formats=(ACTION,), dropped=RESPONSE)

COMMAND = ModelFamily(
    name="command",
    layout=LAYOUT,
    answer_prefix="<|END_THINKING|><|START_RESPONSE|>",
    model_types=("cohere", "cohere2", "cohere2_moe", "cohere2_vision"),
    stop_tokens=(END,),
    special_tokens=(
        *TURNS,
        "<|START_TOOL_RESULT|>",
        "<|END_TOOL_RESULT|>",
        *THINKING,
        *ACTION.opens,
        *ACTION.closes,
        *RESPONSE,
    ),
)
