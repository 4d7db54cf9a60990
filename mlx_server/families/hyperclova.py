"""HyperCLOVA X SEED Think: thoughts and calls are separate turns of the assistant."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import HYPERCLOVA as CALLS

TURN, TURN_END, STOP = "<|im_start|>assistant", "<|im_end|>", "<|stop|>"
THOUGHTS = ("/think\n", f"{TURN_END}\n{TURN}")

HYPERCLOVA = ModelFamily(
    name="hyperclova",
    layout=MarkupLayout(
        reasoning=(THOUGHTS,),
        call_formats=(CALLS,),
        dropped=(f"{TURN_END}\n{TURN}", TURN_END, STOP),
    ),
    answer_prefix=f"{THOUGHTS[1]}\n",
    template_markers=CALLS.opens,
    stop_tokens=("<|endofturn|>", STOP),
    special_tokens=("<|im_start|>", TURN_END, "<|endofturn|>", STOP),
)
