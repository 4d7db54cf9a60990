"""InternLM 2 to 3 and Intern-S1: ChatML, `<think>`, calls as actions of the `<|plugin|>`."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import INTERNLM as CALLS

INTERNLM = ModelFamily(
    name="internlm",
    layout=MarkupLayout(call_formats=(CALLS,)),
    answer_prefix="\n</think>\n\n",
    model_types=("internlm2", "internlm3", "interns1", "intern_s1"),
    stop_tokens=("<|im_end|>",),
    special_tokens=(
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|action_start|>",
        "<|action_end|>",
        "<|plugin|>",
    ),
)
