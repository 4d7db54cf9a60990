"""Functionary: each message of an answer has a header with a tool's name, or `all` for text.

The header is `>>>` in v3.2; in v2 it has control tokens, of which the prompt writes the first.
"""

from collections.abc import Sequence

from mlx_server.families.base import ModelFamily
from mlx_server.messages import Tool
from mlx_server.parsers.markup.layout import Header, MarkupLayout
from mlx_server.tool_parsers import line_named_calls

TO_USER = ("all\n", "all \n", "all\r\n")
"""The header of a message to the user, and how models misspell it."""


def _layout(tools: Sequence[Tool]) -> MarkupLayout:
    return MarkupLayout(
        reasoning=(),
        call_formats=line_named_calls.functionary(tools),
        dropped=tuple(f"{opening}{each}" for opening in (">>>", ">>> ") for each in TO_USER),
        leads=TO_USER,
    )


FUNCTIONARY = ModelFamily(
    name="functionary",
    layout=_layout,
    shapes=("", "name ⏎ {…}"),
    template_markers=(">>>all",),
    stop_tokens=("<|eot_id|>",),
    special_tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
)

FROM, RECIPIENT, CONTENT, STOP = "<|from|>", "<|recipient|>", "<|content|>", "<|stop|>"
TURN, TO_USER_V2 = f"{FROM}assistant\n{RECIPIENT}", f"all\n{CONTENT}"


def _layout_v2(tools: Sequence[Tool]) -> MarkupLayout:
    # a tokenizer of Llama's first kind writes a space after each control token
    return MarkupLayout(
        reasoning=(),
        call_formats=line_named_calls.functionary_v2(tools, TURN, f"\n{CONTENT}"),
        dropped=(
            *(TURN, f"{FROM} assistant\n{RECIPIENT}"),
            *(TO_USER_V2, f"{TO_USER_V2} ", FROM, RECIPIENT, CONTENT),
        ),
        header=Header(RECIPIENT, (f"\n{CONTENT}",), calls=True),
    )


FUNCTIONARY_V2 = ModelFamily(
    name="functionary_v2",
    layout=_layout_v2,
    shapes=("", f"name ⏎ {CONTENT}{{…}}"),
    template_markers=(FROM, RECIPIENT, CONTENT),
    stop_tokens=(STOP,),
    special_tokens=("<s>", "</s>", FROM, RECIPIENT, CONTENT, STOP),
)
