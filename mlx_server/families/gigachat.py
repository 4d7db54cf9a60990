"""GigaChat 3, whose calls are messages of their own, and 3.5, whose calls are tags."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import GIGACHAT as CALLS
from mlx_server.tool_parsers.tag_formats import GIGACHAT35 as TAGGED
from mlx_server.tool_parsers.tag_formats import GIGACHAT35_RESPELLED, GIGACHAT35_WITHOUT_BLOCK

SEPARATORS = ROLE, MESSAGE = "<|role_sep|>\n", "<|message_sep|>\n\n"
"""The tokens between role and text and between messages, whose line breaks are part of them."""
ENDS = (MESSAGE, MESSAGE.strip())

GIGACHAT = ModelFamily(
    name="gigachat",
    layout=MarkupLayout(call_formats=(CALLS,), dropped=(*ENDS, f"assistant{ROLE}")),
    answer_prefix="\n</think>\n\n",
    template_markers=("<|role_sep|>", "function call"),
    stop_tokens=("</s>",),
    special_tokens=("<s>", "</s>", *SEPARATORS, "<|function_call|>"),
)

GIGACHAT35 = ModelFamily(
    name="gigachat35",
    layout=MarkupLayout(
        call_formats=(TAGGED, GIGACHAT35_WITHOUT_BLOCK),
        inline_formats=lambda tools: GIGACHAT35_RESPELLED,
        dropped=ENDS,
    ),
    answer_prefix="\n</think>\n\n",
    template_markers=("｜GCML｜",),
    stop_tokens=("</s>",),
    special_tokens=("<s>", "</s>", *SEPARATORS, "｜GCML｜"),
)
