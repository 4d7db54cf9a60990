"""Fine-tunes of general models whose templates show that they write calls as Hermes does."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import HERMES as CALLS

LAYOUT = MarkupLayout(call_formats=(CALLS,))

HERMES = ModelFamily(
    name="hermes",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    model_types=("llama", "mistral", "mixtral", "gemma", "gemma2", "phi3"),
    template_markers=CALLS.opens,
    stop_tokens=("<|im_end|>",),
    special_tokens=("<|im_start|>", "<|im_end|>"),
)
