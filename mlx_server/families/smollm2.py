"""SmolLM2, whose model type is Llama's: ChatML; the largest one writes calls as Hermes does."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import HERMES

LAYOUT = MarkupLayout(reasoning=(), call_formats=(HERMES,), trims=False)

SMOLLM2 = ModelFamily(
    name="smollm2",
    layout=LAYOUT,
    model_types=("llama",),
    template_markers=("<|im_start|>", "SmolLM"),
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
)
