"""Kimi K3: an answer has the elements `think`, `response` and `tools`, in this order."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.kimi_k3 import (
    CLOSE,
    KIMI_K3_CALLS,
    KIMI_K3_SPACED,
    OPEN,
    SEPARATOR,
    beginning,
    end,
    spaced,
)
from mlx_server.tool_parsers.kimi_k3 import KIMI_K3 as CALLS

LAYOUT = MarkupLayout(
    reasoning=((beginning("think"), end("think")),),
    call_formats=(CALLS,),
    inline_formats=lambda tools: (KIMI_K3_SPACED, KIMI_K3_CALLS),
    dropped=(
        beginning("response"),
        end("response"),
        end("message"),
        *spaced(OPEN, "response"),
        *spaced(CLOSE, "response"),
        *spaced(CLOSE, "message"),
    ),
    halves=(OPEN, CLOSE),
    worded_reasoning=tuple((opening, end("think")) for opening in spaced(OPEN, "think")),
    trims=False,
    calls_end_reasoning=True,
    ends_reasoning=(
        beginning("response"),
        end("message"),
        *spaced(CLOSE, "think"),
        *spaced(OPEN, "response"),
        *spaced(CLOSE, "message"),
    ),
)

KIMI_K3 = ModelFamily(
    name="kimi_k3",
    layout=LAYOUT,
    answer_prefix=end("think") + beginning("response"),
    model_types=("kimi_k3",),
    stop_tokens=("<|end_of_msg|>", "[EOS]"),
    special_tokens=("[BOS]", "[EOS]", OPEN, CLOSE, SEPARATOR, "<|end_of_msg|>"),
)
