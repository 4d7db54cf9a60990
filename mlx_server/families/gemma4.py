"""Gemma 4: reasoning in a channel of its own, calls with bare keys and delimited strings."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import GEMMA4 as CALLS
from mlx_server.tool_parsers.formats import inline_gemma4

CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"

ANSWERS = tuple(
    f"{CHANNEL}{name}\n" for name in ("response", "final", "content", "answer", "text", "output")
)
"""The headers of channels for the answer, which models sometimes write although no template has
them."""

LAYOUT = MarkupLayout(
    reasoning=((f"{CHANNEL}thought\n", CHANNEL_END), (CHANNEL, CHANNEL_END)),
    call_formats=(CALLS,),
    inline_formats=inline_gemma4,
    dropped=ANSWERS,
    ends_reasoning=ANSWERS,
    transparent=("<|tool_response>",),
    worded_reasoning=(("thought\n", CHANNEL_END),),  # some models leave out the opening token
    trims_text=False,
)

GEMMA4 = ModelFamily(
    name="gemma4",
    layout=LAYOUT,
    answer_prefix=f"\n{CHANNEL_END}",
    model_types=("gemma4", "gemma4_text", "gemma4_unified"),
    stop_tokens=("<turn|>", "<|tool_response>", "<eos>"),
    special_tokens=(
        "<bos>",
        "<eos>",
        "<|turn>",
        "<turn|>",
        "<|think|>",
        CHANNEL,
        CHANNEL_END,
        "<|tool>",
        "<tool|>",
        *CALLS.opens,
        *CALLS.closes,
        "<|tool_response>",
        "<tool_response|>",
        *CALLS.inner,
    ),
)
