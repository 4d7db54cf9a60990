"""PLaMo 3: delimiters of one form, `<|plamo:begin_…:plamo|>`, around every part of a call."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import PLAMO as CALLS
from mlx_server.tool_parsers.formats import PLAMO_WITHOUT_SECTION

THOUGHTS = ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>")

PLAMO = ModelFamily(
    name="plamo",
    layout=MarkupLayout(reasoning=(THOUGHTS,), call_formats=(CALLS, PLAMO_WITHOUT_SECTION)),
    answer_prefix=THOUGHTS[1],
    model_types=("plamo", "plamo2", "plamo3"),
    stop_tokens=("<|plamo:tag|>", "<|plamo:eos|>"),
    special_tokens=(
        "<|plamo:bos|>",
        "<|plamo:eos|>",
        "<|plamo:tag|>",
        "<|plamo:msg|>",
        "<|plamo:constrain|>",
        "<|plamo:begin_",
        "<|plamo:end_",
        ":plamo|>",
    ),
)
