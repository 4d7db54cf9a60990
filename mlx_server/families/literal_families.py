"""Families whose models write arguments as Python does, or in Gemma's own syntax."""

from mlx_server.families.base import spelled
from mlx_server.families.markup import MarkupFamily
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.parse_context import THINK
from mlx_server.prompts.history_rendering import as_python_list
from mlx_server.tool_parsers import formats

LLAMA3 = MarkupFamily(  # Llama 3 to 3.3: calls in any of Meta's formats, depending on the prompt
    "llama3",
    MarkupLayout(
        call_formats=(
            *(formats.BARE_JSON, formats.BARE_PYTHON),
            *(formats.LLAMA_TAGGED, formats.LLAMA_FUNCTION),
        ),
        inline_formats=formats.inline_python,
        trims_text=False,
    ),
    model_types=("llama", "mllama"),
    stop_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    special_tokens=spelled(
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> "
        "<|eot_id|> <|python_tag|>"
    ),
)
LLAMA4 = MarkupFamily(
    "llama4",
    MarkupLayout(
        call_formats=(formats.BARE_JSON, formats.BARE_PYTHON, formats.LLAMA4_PYTHON),
        inline_formats=formats.inline_python,
        trims_text=False,
    ),
    model_types=("llama4", "llama4_text"),
    stop_tokens=("<|eot|>", "<|eom|>", "<|end_of_text|>"),
    special_tokens=spelled(
        "<|begin_of_text|> <|end_of_text|> <|header_start|> <|header_end|> <|eom|> <|eot|> "
        "<|python_start|> <|python_end|>"
    ),
)
LFM2 = MarkupFamily(  # the instruct models of LFM2.5 write no delimiters around calls
    "lfm2",
    MarkupLayout(
        call_formats=(formats.LFM2, formats.BARE_PYTHON), inline_formats=formats.inline_python
    ),
    write_calls=as_python_list("<|tool_call_start|>", "<|tool_call_end|>"),
    model_types=("lfm2", "lfm2_moe", "lfm2-vl", "lfm2_vl"),
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    special_tokens=spelled(
        "<|startoftext|> <|endoftext|> <|im_start|> <|im_end|> "
        "<|tool_list_start|> <|tool_list_end|> <|tool_call_start|> <|tool_call_end|> "
        "<|tool_response_start|> <|tool_response_end|>"
    ),
)
OLMO3 = MarkupFamily(
    "olmo3",
    MarkupLayout(call_formats=(formats.OLMO3,)),
    model_types=("olmo3", "olmo_hybrid"),
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
)
MINICPM = MarkupFamily(  # MiniCPM 3 and 4
    "minicpm",
    MarkupLayout((THINK, ("<|thought_start|>", "<|thought_end|>")), (formats.MINICPM,)),
    model_types=("minicpm", "minicpm3", "minicpm4"),
    stop_tokens=("<|im_end|>", "</s>"),
    special_tokens=(
        *spelled("<s> </s> <|im_start|> <|im_end|> <|thought_start|> <|thought_end|>"),
        *(*formats.MINICPM.opens, *formats.MINICPM.closes),
    ),
)

GEMMA3 = MarkupFamily(  # Gemma up to 3n, whose templates have no tools
    "gemma3",
    answer_prefix="",
    model_types=("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
    stop_tokens=("<end_of_turn>", "<eos>"),
    special_tokens=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
)
FUNCTION_GEMMA = MarkupFamily(
    "functiongemma",
    MarkupLayout(
        reasoning=(),
        call_formats=(formats.FUNCTION_GEMMA,),
        inline_formats=formats.inline_function_gemma,
        trims=False,
    ),
    answer_prefix="",
    model_types=("gemma3", "gemma3_text"),
    template_markers=formats.FUNCTION_GEMMA.opens,
    stop_tokens=("<end_of_turn>", "<start_function_response>", "<eos>"),
    special_tokens=(
        *GEMMA3.special_tokens,
        *("<start_function_declaration>", "<end_function_declaration>"),
        *(*formats.FUNCTION_GEMMA.opens, *formats.FUNCTION_GEMMA.closes),
        *("<start_function_response>", "<end_function_response>", *formats.FUNCTION_GEMMA.inner),
    ),
)

_CHANNEL, _CHANNEL_END = "<|channel>", "<channel|>"
_ANSWERS = tuple(
    f"{_CHANNEL}{name}\n" for name in ("response", "final", "content", "answer", "text", "output")
)
"""The headers of channels for the answer, which models sometimes write although no template has
them."""
GEMMA4 = MarkupFamily(
    "gemma4",
    MarkupLayout(
        ((f"{_CHANNEL}thought\n", _CHANNEL_END), (_CHANNEL, _CHANNEL_END)),
        call_formats=(formats.GEMMA4,),
        inline_formats=formats.inline_gemma4,
        dropped=_ANSWERS,
        ends_reasoning=_ANSWERS,
        transparent=("<|tool_response>",),
        worded_reasoning=(("thought\n", _CHANNEL_END),),  # some leave out the opening token
        trims_text=False,
    ),
    answer_prefix=f"\n{_CHANNEL_END}",
    model_types=("gemma4", "gemma4_text", "gemma4_unified"),
    stop_tokens=("<turn|>", "<|tool_response>", "<eos>"),
    special_tokens=(
        *spelled("<bos> <eos> <|turn> <turn|> <|think|>"),
        *(_CHANNEL, _CHANNEL_END, "<|tool>", "<tool|>"),
        *(*formats.GEMMA4.opens, *formats.GEMMA4.closes),
        *("<|tool_response>", "<tool_response|>", *formats.GEMMA4.inner),
    ),
)
