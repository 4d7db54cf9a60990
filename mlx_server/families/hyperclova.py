"""HyperCLOVA X SEED Think: thoughts and calls are turns of the assistant's of their own."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup import MarkupLayout
from mlx_server.tool_parsers.formats import HYPERCLOVA as CALLS

TURN, TURN_END = "<|im_start|>assistant", "<|im_end|>"
THOUGHTS = ("/think\n", f"{TURN_END}\n{TURN}")

HYPERCLOVA = ModelFamily(
    name="hyperclova",
    layout=MarkupLayout(
        reasoning=(THOUGHTS,), call_formats=(CALLS,), dropped=(f"{TURN_END}\n{TURN}", TURN_END)
    ),
    answer_prefix=f"{THOUGHTS[1]}\n",
    template_markers=CALLS.opens,
    stop_tokens=("<|endofturn|>",),
    special_tokens=("<|im_start|>", "<|im_end|>", "<|endofturn|>", "<|stop|>"),
)
