"""Kimi K3: an answer has the elements `think`, `response` and `tools`, in this order."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.kimi_k3 import CLOSE, OPEN, SEPARATOR, beginning, end
from mlx_server.tool_parsers.kimi_k3 import KIMI_K3 as NOTATION

LAYOUT = MarkupLayout(
    reasoning=((beginning("think"), end("think")),),
    call_formats=(NOTATION,),
    dropped=(beginning("response"), end("response"), end("message")),
    trims=False,
    calls_end_reasoning=True,
    ends_reasoning=(beginning("response"), end("message")),
)

KIMI_K3 = ModelFamily(
    name="kimi_k3",
    layout=LAYOUT,
    answer_prefix=end("think") + beginning("response"),
    model_types=("kimi_k3",),
    stop_tokens=("<|end_of_msg|>", "[EOS]"),
    special_tokens=("[BOS]", "[EOS]", OPEN, CLOSE, SEPARATOR, "<|end_of_msg|>"),
)
