"""Families whose models write calls as JSON between delimiters of their own."""

from collections.abc import Sequence

from mlx_server.families.base import spelled
from mlx_server.families.markup import MarkupFamily
from mlx_server.messages import Tool
from mlx_server.parsers.markup_layout import Header, MarkupLayout
from mlx_server.prompts.history_rendering import as_json_array
from mlx_server.tool_parsers import formats

NEMOTRON = MarkupFamily(
    "nemotron",
    MarkupLayout(call_formats=(formats.NEMOTRON,)),
    template_markers=formats.NEMOTRON.opens,  # the model types are also those of other families
    stop_tokens=("<|eot_id|>", "<SPECIAL_12>"),
    special_tokens=spelled(
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
        "<SPECIAL_10> <SPECIAL_11> <SPECIAL_12>"
    ),
)

# Granite 3.2 begins and ends its thoughts with sentences, 3.3 and later with tags
GRANITE = MarkupFamily(
    "granite",
    MarkupLayout(
        call_formats=(formats.GRANITE, formats.HERMES),
        dropped=("<response>", "</response>"),
        worded_reasoning=(
            ("Here is my thought process:", "Here is my response:"),
            ("Here's my thought process:", "Here's my response:"),
        ),
    ),
    write_calls=as_json_array("<|tool_call|>"),
    model_types=("granite", "granitemoe", "granitemoehybrid", "granitemoeshared"),
    stop_tokens=("<|end_of_text|>",),
    special_tokens=spelled("<|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|>"),
)
GRANITE_CODE = MarkupFamily(  # Granite 20B for functions
    "granite_code",
    MarkupLayout(reasoning=(), call_formats=(formats.GRANITE_CODE,)),
    answer_prefix="",
    model_types=("gpt_bigcode",),
    template_markers=formats.GRANITE_CODE.opens,
    stop_tokens=("<|endoftext|>",),
    special_tokens=("<|endoftext|>",),
)

PHI4 = MarkupFamily(  # and Phi 3
    "phi4",
    MarkupLayout(call_formats=(formats.PHI4, formats.FUNCTOOLS, formats.FUNCTOOLS_OBJECT)),
    write_calls=as_json_array("<|tool_call|>", "<|/tool_call|>"),
    model_types=("phi3", "phi3small", "phimoe", "phi4mm"),
    stop_tokens=("<|end|>", "<|im_end|>", "<|endoftext|>"),
    special_tokens=spelled(
        "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|> <|tool|> <|/tool|> <|tool_call|> "
        "<|/tool_call|> <|tool_response|> <|im_start|> <|im_sep|> <|im_end|>"
    ),
)

# Cohere's Command R7B and A, in whose answers every part has delimiters of its own, and R and R+
_COHERE_END = "<|END_OF_TURN_TOKEN|>"
_COHERE_TURNS = spelled(
    f"<BOS_TOKEN> <|START_OF_TURN_TOKEN|> {_COHERE_END} "
    "<|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>"
)
_RESPONSE = spelled("<|START_RESPONSE|> <|END_RESPONSE|> <|START_TEXT|> <|END_TEXT|>")
_THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")
COMMAND = MarkupFamily(
    "command",
    MarkupLayout((_THINKING,), call_formats=(formats.COMMAND,), dropped=_RESPONSE),
    answer_prefix="<|END_THINKING|><|START_RESPONSE|>",
    model_types=("cohere", "cohere2", "cohere2_moe", "cohere2_vision"),
    stop_tokens=(_COHERE_END,),
    special_tokens=(
        *_COHERE_TURNS,
        *("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>", *_THINKING),
        *(*formats.COMMAND.opens, *formats.COMMAND.closes, *_RESPONSE),
    ),
)
COMMAND_R = MarkupFamily(
    "command_r",
    MarkupLayout(reasoning=(), call_formats=(formats.COMMAND_R,)),
    answer_prefix="",
    model_types=("cohere",),
    template_markers=("Action:", "```json"),
    stop_tokens=(_COHERE_END,),
    special_tokens=_COHERE_TURNS,
)

# An array of calls in `<tool_calls>`

_ANSWER = "[BEGIN FINAL RESPONSE]"
APRIEL = MarkupFamily(
    "apriel",
    MarkupLayout(
        (("Here are my reasoning steps:", _ANSWER), ("<thinking>", "</thinking>")),
        call_formats=(formats.TOOL_CALLS,),
        dropped=("[END FINAL RESPONSE]",),
        calls_end_reasoning=True,
    ),
    answer_prefix=f"\n{_ANSWER}\n",
    template_markers=(_ANSWER,),
    stop_tokens=("<|end|>",),
    special_tokens=spelled(
        "<s> <|end|> <|begin_system|> <|begin_user|> <|begin_assistant|> <|begin_tool_result|>"
    ),
)
HUNYUAN = MarkupFamily(  # A13B and the dense ones
    "hunyuan",
    MarkupLayout(call_formats=(formats.TOOL_CALLS,), dropped=("<answer>", "</answer>")),
    answer_prefix="\n</think>\n<answer>\n",
    write_calls=as_json_array(*formats.TOOL_CALLS.opens, *formats.TOOL_CALLS.closes),
    model_types=("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    stop_tokens=("<|eos|>",),
    special_tokens=("<|startoftext|>", "<|extra_0|>", "<|extra_4|>", "<|eos|>"),
)
JAMBA = MarkupFamily(
    "jamba",
    MarkupLayout(call_formats=(formats.TOOL_CALLS,)),
    write_calls=as_json_array(*formats.TOOL_CALLS.opens, *formats.TOOL_CALLS.closes),
    model_types=("jamba",),
    stop_tokens=("<|eom|>", "<|endoftext|>"),
    special_tokens=(
        *spelled("<|startoftext|> <|endoftext|> <|bom|> <|eom|> <|system|> <|user|> <|assistant|>"),
        *("<|tool|>", "<tool_definitions>", "</tool_definitions>"),
        *(*formats.TOOL_CALLS.opens, *formats.TOOL_CALLS.closes),
    ),
)

# Calls that are messages or turns of their own

_ROLE, _MESSAGE = "<|role_sep|>\n", "<|message_sep|>\n\n"
GIGACHAT_SEPARATORS = (_ROLE, _MESSAGE)
"""The tokens between role and text and between messages, whose line breaks are part of them."""
GIGACHAT_ENDS = (_MESSAGE, _MESSAGE.strip())
GIGACHAT = MarkupFamily(
    "gigachat",
    MarkupLayout(call_formats=(formats.GIGACHAT,), dropped=(*GIGACHAT_ENDS, f"assistant{_ROLE}")),
    template_markers=("<|role_sep|>", "function call"),
    stop_tokens=("</s>",),
    special_tokens=("<s>", "</s>", *GIGACHAT_SEPARATORS, "<|function_call|>"),
)

_TURN, _TURN_END, _STOP = "<|im_start|>assistant", "<|im_end|>", "<|stop|>"
HYPERCLOVA = MarkupFamily(  # HyperCLOVA X SEED Think
    "hyperclova",
    MarkupLayout(
        (("/think\n", f"{_TURN_END}\n{_TURN}"),),
        call_formats=(formats.HYPERCLOVA,),
        dropped=(f"{_TURN_END}\n{_TURN}", _TURN_END, _STOP),
    ),
    answer_prefix=f"{_TURN_END}\n{_TURN}\n",
    template_markers=formats.HYPERCLOVA.opens,
    stop_tokens=("<|endofturn|>", _STOP),
    special_tokens=("<|im_start|>", _TURN_END, "<|endofturn|>", _STOP),
)

_START, _TEXT, _END = "<|message_model|>", "<|content_text|>", "<|end_message|>"
_SAMPLING_END = "<|content_model_end_sampling|>"
_OTHERS = ("<|content_invoke_tool_text|>", "<|content_tool_error|>")
"""The headers of contents that a client can only be shown as text."""


def _inkling(tools: Sequence[Tool]) -> MarkupLayout:
    named = tuple(f"{_START}{tool.name}" for tool in tools)
    return MarkupLayout(
        (("<|content_thinking|>", _END),),
        call_formats=(formats.INKLING,),
        dropped=(_START, *named, _TEXT, *_OTHERS, _END, _SAMPLING_END),
        header=Header(_START, formats.INKLING.opens),
    )


INKLING = MarkupFamily(
    "inkling",
    _inkling,
    answer_prefix=f"{_END}{_START}{_TEXT}",
    template_markers=formats.INKLING.opens,
    stop_tokens=(_SAMPLING_END,),
    special_tokens=(
        *("<|message_system|>", "<|message_user|>", "<|message_tool|>", _START, _TEXT),
        *("<|content_xml|>", "<|content_thinking|>", *formats.INKLING.opens, *_OTHERS),
        *(_END, _SAMPLING_END),
    ),
)
INTERNLM = MarkupFamily(  # InternLM 2 to 3 and Intern-S1
    "internlm",
    MarkupLayout(call_formats=(formats.INTERNLM,)),
    model_types=("internlm2", "internlm3", "interns1", "intern_s1"),
    stop_tokens=("<|im_end|>",),
    special_tokens=spelled(
        "<s> </s> <|im_start|> <|im_end|> <|action_start|> <|action_end|> <|plugin|>"
    ),
)
PANGU = MarkupFamily(  # openPangu: reserved tokens are delimiters
    "pangu",
    MarkupLayout((("[unused16]", "[unused17]"),), call_formats=(formats.PANGU,)),
    answer_prefix="[unused17]",
    template_markers=formats.PANGU.opens,
    stop_tokens=("[unused10]",),
    special_tokens=spelled("<s> [unused9] [unused10] [unused11] [unused12] [unused16] [unused17]"),
)


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
