"""Families whose models write a call's name, and then its arguments as JSON."""

import re
from hashlib import sha256

from mlx_server.families.base import spelled
from mlx_server.families.markup import MarkupFamily
from mlx_server.parsers.markup_layout import Header, MarkupLayout
from mlx_server.parsers.parse_context import THINK
from mlx_server.tool_parsers import formats, named_calls
from mlx_server.tool_parsers.call_format import respelled_delimiter
from mlx_server.tool_parsers.calls import new_short_id

_NINE_CHARACTERS = re.compile(r"[a-zA-Z0-9]{9}")


def nine_character_id(id: str, name: str, number: int) -> str:
    """The call's id, or a digest of it, in nine letters or digits, which many templates require."""
    return id if _NINE_CHARACTERS.fullmatch(id) else sha256(id.encode()).hexdigest()[:9]


MISTRAL = MarkupFamily(  # Mistral, Mixtral, Ministral, Magistral, Devstral
    "mistral",
    # the first Magistral thinks between <think> tags, which are no control tokens there
    MarkupLayout(
        (("[THINK]", "[/THINK]"), THINK), call_formats=(formats.MISTRAL,), new_id=new_short_id
    ),
    call_id=nine_character_id,
    answer_prefix="[/THINK]",
    model_types=("mistral", "mistral3", "mistral4", "ministral3", "mixtral", "pixtral"),
    stop_tokens=("</s>",),
    special_tokens=spelled(
        "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
        "[/TOOL_RESULTS] [TOOL_CALLS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] "
        "[CALL_ID] [THINK] [/THINK]"
    ),
)

_NUMBERED = re.compile(r"functions\.[^\s:]+:\d+")


def numbered_call_id(id: str, name: str, number: int) -> str:
    """The call's id as Kimi K2 writes it, by the number of the call within the conversation."""
    return id if _NUMBERED.fullmatch(id) or not name else f"functions.{name}:{number}"


KIMI_K2 = MarkupFamily(  # K2, K2 Thinking, K2.5 and K2.6
    "kimi_k2",
    # the template writes no white space between reasoning, text and calls
    MarkupLayout(
        call_formats=(formats.KIMI_K2, formats.KIMI_K2_WITHOUT_SECTION, formats.KIMI_K2_SINGULAR),
        trims=False,
        calls_end_reasoning=True,
    ),
    answer_prefix=THINK[1],
    call_id=numbered_call_id,
    model_types=("kimi_k2", "kimi_k25", "kimi_linear"),
    stop_tokens=("<|im_end|>", "[EOS]"),
    special_tokens=(
        *spelled("[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>"),
        *(*formats.KIMI_K2.opens, *formats.KIMI_K2_WITHOUT_SECTION.opens),
        *("<|tool_call_argument_begin|>", *formats.KIMI_K2.closes, *THINK),
    ),
)

_OUTPUTS = tuple(
    f"<｜tool▁{part}｜>" for part in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")
)
"""Delimiters around tool results, which models repeat in their answers."""
DEEPSEEK_TURNS = spelled(
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think>"
)
DEEPSEEK_V3 = MarkupFamily(  # V2.5, V3, R1, V3.1, V3.2-Exp and the R1 distils
    "deepseek_v3",
    MarkupLayout(
        call_formats=(formats.DEEPSEEK, formats.DEEPSEEK_WITHOUT_SECTION),
        inline_formats=lambda tools: formats.DEEPSEEK_RESPELLED,
        transparent=(
            *_OUTPUTS,
            *(each for delimiter in _OUTPUTS for each in respelled_delimiter(delimiter)),
        ),
        calls_end_reasoning=True,
    ),
    template_markers=("<｜tool▁calls▁begin｜>",),
    stop_tokens=("<｜end▁of▁sentence｜>",),
    special_tokens=(
        *DEEPSEEK_TURNS,
        *spelled("<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", *_OUTPUTS),
    ),
)

_INNER = ("<|inner_prefix|>", "<|inner_suffix|>")
APERTUS = MarkupFamily(
    "apertus",
    MarkupLayout((_INNER,), call_formats=(formats.APERTUS,)),
    answer_prefix=_INNER[1],
    model_types=("apertus",),
    stop_tokens=("<|assistant_end|>",),
    special_tokens=(
        *spelled("<s> </s> <|system_start|> <|system_end|> <|developer_start|> <|developer_end|>"),
        *spelled("<|user_start|> <|user_end|> <|assistant_start|> <|assistant_end|>"),
        *(*_INNER, *formats.APERTUS.opens, *formats.APERTUS.closes),
    ),
)
PLAMO = MarkupFamily(  # PLaMo 3: all delimiters are of the form `<|plamo:begin_…:plamo|>`
    "plamo",
    MarkupLayout(
        (("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),),
        call_formats=(formats.PLAMO, formats.PLAMO_WITHOUT_SECTION),
    ),
    answer_prefix="<|plamo:end_think:plamo|>",
    model_types=("plamo", "plamo2", "plamo3"),
    stop_tokens=("<|plamo:tag|>", "<|plamo:eos|>"),
    special_tokens=spelled(
        "<|plamo:bos|> <|plamo:eos|> <|plamo:tag|> <|plamo:msg|> <|plamo:constrain|> "
        "<|plamo:begin_ <|plamo:end_ :plamo|>"
    ),
)

_PARTS = ("<|content|>", "<|tool_calls|>", "<|calls|>", "<|flush|>")
SOLAR_OPEN = MarkupFamily(  # a call's id stands before its name
    "solar_open",
    MarkupLayout(
        (("<|think|>", "<|end|>"),),
        call_formats=(formats.SOLAR_OPEN,),
        dropped=("<|begin|>assistant", "<|end|>", *_PARTS),
    ),
    answer_prefix="<|end|><|begin|>assistant<|content|>",
    model_types=("solar_open",),
    stop_tokens=("<|flush|>", "<|calls|>"),
    special_tokens=(
        *("<|begin|>", "<|think|>", "<|end|>", *_PARTS),
        *(*formats.SOLAR_OPEN.opens, *formats.SOLAR_OPEN.closes, *formats.SOLAR_OPEN.inner),
        "<|tool_response|>",
        *(f"<|tool_response:{part}|>" for part in ("begin", "name", "result", "end")),
        *(f"<|{part}|>" for part in ("tools:begin", "tools:end", "tool:begin", "tool:end")),
    ),
)

# The name is a line of its own

GLM_TURN = "<|assistant|>"
"""The header of every answer, which models repeat; a line break follows it."""
GLM_BOX = ("<|begin_of_box|>", "<|end_of_box|>")
"""Delimiters around the final answer of vision models."""
GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
GLM_TURNS = (*GLM_STOPS, "[gMASK]", "<sop>", "<|system|>", GLM_TURN)
GLM4 = MarkupFamily(  # before 4.5: calls have no delimiters
    "glm4",
    lambda tools: MarkupLayout(
        call_formats=named_calls.glm4(tools), dropped=(GLM_TURN,), transparent=GLM_BOX
    ),
    shapes=("<think>…</think>", "name ⏎ {…}"),
    answer_prefix="</think>",
    model_types=("chatglm", "glm", "glm4", "glm4v"),
    stop_tokens=GLM_STOPS,
    special_tokens=(*GLM_TURNS, *GLM_BOX),
)

_TO_USER = ("all\n", "all \n", "all\r\n")
"""The header of a message to the user, and how models misspell it."""


FUNCTIONARY = MarkupFamily(  # v3.2: each message has a header with a tool's name, or `all` for text
    "functionary",
    lambda tools: MarkupLayout(
        reasoning=(),
        call_formats=named_calls.functionary(tools),
        dropped=tuple(f"{opening}{each}" for opening in (">>>", ">>> ") for each in _TO_USER),
        leads=_TO_USER,
    ),
    answer_prefix="",
    shapes=("", "name ⏎ {…}"),
    template_markers=(">>>all",),
    stop_tokens=("<|eot_id|>",),
    special_tokens=spelled(
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
    ),
)

_FROM, _RECIPIENT, _CONTENT, _STOP = "<|from|>", "<|recipient|>", "<|content|>", "<|stop|>"
_TURN, _TO_USER_V2 = f"{_FROM}assistant\n{_RECIPIENT}", f"all\n{_CONTENT}"


FUNCTIONARY_V2 = MarkupFamily(
    "functionary_v2",  # the header has control tokens, of which the prompt writes the first
    # a tokenizer of Llama's first kind writes a space after each control token
    lambda tools: MarkupLayout(
        reasoning=(),
        call_formats=named_calls.functionary_v2(tools, _TURN, f"\n{_CONTENT}"),
        dropped=(
            *(_TURN, f"{_FROM} assistant\n{_RECIPIENT}"),
            *(_TO_USER_V2, f"{_TO_USER_V2} ", _FROM, _RECIPIENT, _CONTENT),
        ),
        header=Header(_RECIPIENT, (f"\n{_CONTENT}",), calls=True),
    ),
    answer_prefix="",
    shapes=("", f"name ⏎ {_CONTENT}{{…}}"),
    template_markers=(_FROM, _RECIPIENT, _CONTENT),
    stop_tokens=(_STOP,),
    special_tokens=("<s>", "</s>", _FROM, _RECIPIENT, _CONTENT, _STOP),
)
