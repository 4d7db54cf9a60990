"""SmolLM2: ChatML, and text for an answer. A Llama to its config.json; the template tells."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.text import TextParser

SMOLLM2 = ModelFamily(
    name="smollm2",
    make_parser=TextParser,
    model_types=("llama",),
    template_marks=("<|im_start|>", "SmolLM"),
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
)
