"""OLMo 3: ChatML, `<think>`, calls as Python between `<function_calls>` tags, one on each line."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import OLMO3 as CALLS

LAYOUT = MarkupLayout(call_formats=(CALLS,))

OLMO3 = ModelFamily(
    name="olmo3",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    model_types=("olmo3", "olmo_hybrid"),
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
)
