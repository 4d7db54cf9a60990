"""Families whose models write calls as Hermes' do: JSON in `<tool_call>`."""

from mlx_server.families.base import spelled
from mlx_server.families.markup import MarkupFamily
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.tool_parsers import formats

_LAYOUT = MarkupLayout(call_formats=(formats.HERMES,))

SMOLLM2 = MarkupFamily(  # the model type is Llama's; the largest one calls tools
    "smollm2",
    MarkupLayout(reasoning=(), call_formats=(formats.HERMES,), trims=False),
    answer_prefix="",
    model_types=("llama",),
    template_markers=("<|im_start|>", "SmolLM"),
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
)
SMOLLM3 = MarkupFamily(
    "smollm3",
    _LAYOUT,
    model_types=("smollm3",),
    stop_tokens=("<|im_end|>", "<|end_of_text|>"),
    special_tokens=spelled(
        "<|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|> <think> </think> "
        "<tool_call> </tool_call> <tool_response> </tool_response>"
    ),
)
QWEN3 = MarkupFamily(  # and Qwen 2 and 2.5
    "qwen3",
    _LAYOUT,
    model_types=spelled(
        "qwen2 qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe"
    ),
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    special_tokens=spelled(
        "<|endoftext|> <|im_start|> <|im_end|> "
        "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think> "
        "<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
    ),
)
HERMES = MarkupFamily(  # fine-tunes of general models whose templates show such calls
    "hermes",
    _LAYOUT,
    model_types=("llama", "mistral", "mixtral", "gemma", "gemma2", "phi3"),
    template_markers=formats.HERMES.opens,
    stop_tokens=("<|im_end|>",),
    special_tokens=("<|im_start|>", "<|im_end|>"),
)
EXAONE4 = MarkupFamily(
    "exaone4",
    _LAYOUT,
    model_types=("exaone4", "exaone_moe"),
    stop_tokens=("[|endofturn|]",),
    special_tokens=spelled(
        "[BOS] [|endofturn|] [|system|] [|user|] [|assistant|] [|tool|] "
        "<think> </think> <tool_call> </tool_call>"
    ),
)
ERNIE4_5 = MarkupFamily(
    "ernie4_5",
    MarkupLayout(call_formats=(formats.HERMES,), dropped=("<response>", "</response>")),
    model_types=("ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl", "ernie4_5_vl"),
    stop_tokens=("</s>", "<|im_end|>"),
    special_tokens=spelled(
        "<s> </s> <|im_start|> <|im_end|> <think> </think> <response> </response> "
        "<tool_call> </tool_call>"
    ),
)
PLAIN = MarkupFamily(  # models of no known family, which may also write an answer that is JSON
    "plain",
    MarkupLayout(call_formats=(formats.HERMES, formats.PLAIN_OBJECT, formats.PLAIN_ARRAY)),
    stop_tokens=("<|role_end|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_turn|>"),
)
