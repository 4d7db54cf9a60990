"""Solar Open, whose calls have an id before the name, and Solar Open 2, whose keys and values have
delimiters."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import SOLAR_OPEN as CALLS
from mlx_server.tool_parsers.tag_formats import SOLAR_OPEN2 as KEYED

THOUGHTS = ("<|think|>", "<|end|>")
PARTS = ("<|content|>", "<|tool_calls|>", "<|calls|>", "<|flush|>")

SOLAR_OPEN = ModelFamily(
    name="solar_open",
    layout=MarkupLayout(
        reasoning=(THOUGHTS,),
        call_formats=(CALLS,),
        dropped=("<|begin|>assistant", "<|end|>", *PARTS),
    ),
    answer_prefix="<|end|><|begin|>assistant<|content|>",
    model_types=("solar_open",),
    stop_tokens=("<|flush|>", "<|calls|>"),
    special_tokens=(
        "<|begin|>",
        *THOUGHTS,
        *PARTS,
        *CALLS.opens,
        *CALLS.closes,
        *CALLS.inner,
        "<|tool_response|>",
        *(f"<|tool_response:{part}|>" for part in ("begin", "name", "result", "end")),
        *(f"<|{part}|>" for part in ("tools:begin", "tools:end", "tool:begin", "tool:end")),
    ),
)

THOUGHTS_2 = ("<|think:start|>", "<|think:end|>")

SOLAR_OPEN2 = ModelFamily(
    name="solar_open2",
    layout=MarkupLayout(reasoning=(THOUGHTS_2,), call_formats=(KEYED,)),
    answer_prefix=THOUGHTS_2[1],
    model_types=("solar_open2",),
    stop_tokens=("<|im:end|>",),
    special_tokens=(
        "<|im:start|>",
        "<|im:content|>",
        "<|im:end|>",
        *THOUGHTS_2,
        *KEYED.inner,
        "<|tool:start|>",
        "<|tool:end|>",
        "<|tool_response:start|>",
        "<|tool_response:end|>",
    ),
)
