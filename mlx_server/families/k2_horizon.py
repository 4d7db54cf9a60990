"""K2 Horizon: three pairs of thinking tags for three efforts, calls of keys, types and values."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.tag_formats import K2_HORIZON as CALLS
from mlx_server.tool_parsers.tag_formats import K2_HORIZON_ALONE

THOUGHTS = tuple(
    (f"<ifm|{name}>", f"</ifm|{name}>") for name in ("think", "think_fast", "think_faster")
)

K2_HORIZON = ModelFamily(
    name="k2_horizon",
    layout=MarkupLayout(
        reasoning=THOUGHTS,
        call_formats=(CALLS,),
        inline_formats=lambda tools: (K2_HORIZON_ALONE,),
    ),
    answer_prefix=THOUGHTS[0][1],
    template_markers=CALLS.opens,
    stop_tokens=("<|ifm|im_end|>", "<|ifm|endoftext|>"),
    special_tokens=(
        "<|ifm|begin_of_text|>",
        "<|ifm|endoftext|>",
        "<|ifm|im_start|>",
        "<|ifm|im_end|>",
        *(delimiter for pair in THOUGHTS for delimiter in pair),
        *CALLS.opens,
        *CALLS.inner,
        *CALLS.closes,
    ),
)
