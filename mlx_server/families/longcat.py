"""LongCat Flash: `<longcat_think>`, calls in `<longcat_tool_call>`, in JSON or in tags."""

from dataclasses import replace

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import LONGCAT_JSON
from mlx_server.tool_parsers.tag_formats import LONGCAT as KEYED

THOUGHTS = ("<longcat_think>", "</longcat_think>")
CALLS = replace(KEYED, blocks=(*LONGCAT_JSON.blocks, *KEYED.blocks), repair=LONGCAT_JSON.repair)

LONGCAT = ModelFamily(
    name="longcat",
    layout=MarkupLayout(reasoning=(THOUGHTS,), call_formats=(CALLS,)),
    answer_prefix=THOUGHTS[1],
    model_types=("longcat_flash", "longcat_flash_ngram"),
    stop_tokens=("</longcat_s>",),
    special_tokens=(
        "<longcat_s>",
        "</longcat_s>",
        "<longcat_system>",
        "<longcat_user>",
        "<longcat_assistant>",
        *THOUGHTS,
        *CALLS.opens,
        *CALLS.closes,
    ),
)
