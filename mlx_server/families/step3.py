"""Step 3: `<think>`, calls as tags, in a section between control tokens."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.tag_formats import STEP3 as CALLS
from mlx_server.tool_parsers.tag_formats import STEP3_RESPELLED, STEP3_WITHOUT_BLOCK

STEP3 = ModelFamily(
    name="step3",
    layout=MarkupLayout(
        call_formats=(CALLS,),
        inline_formats=lambda tools: (*STEP3_WITHOUT_BLOCK, *STEP3_RESPELLED),
        calls_end_reasoning=True,
    ),
    answer_prefix="\n</think>\n\n",
    model_types=("step3", "step3_text", "step3_vl"),
    stop_tokens=("<|EOT|>",),
    special_tokens=(
        "<｜begin▁of▁sentence｜>",
        "<|BOT|>",
        "<|EOT|>",
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_call_end｜>",
        "<｜tool_sep｜>",
    ),
)
