"""DeepSeek V3.2, V4 and V4.1: calls in DSML."""

from mlx_server.families.base import ModelFamily
from mlx_server.families.deepseek_v3 import TURNS
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.tag_formats import DSML, DSML_FORMATS, DSML_RESPELLED

LAYOUT = MarkupLayout(
    call_formats=DSML_FORMATS,
    inline_formats=lambda tools: DSML_RESPELLED,
    calls_end_reasoning=True,
)

DEEPSEEK_V32 = ModelFamily(
    name="deepseek_v32",
    layout=LAYOUT,
    answer_prefix="</think>",
    model_types=("deepseek_v32", "deepseek_v4", "deepseek_v41"),
    stop_tokens=("<｜end▁of▁sentence｜>",),
    special_tokens=(*TURNS, DSML),
)
