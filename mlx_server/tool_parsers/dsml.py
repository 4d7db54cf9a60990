"""DeepSeek's markup language from V3.2 on: `<｜DSML｜invoke name="f">` and parameters that say
whether they are text or JSON, in a block that every version calls by another name.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import Notation, parsed
from mlx_server.tool_parsers.tags import Tags, block, block_of

DSML = "｜DSML｜"


def _notation(name: str, gap: str = "") -> Notation:
    """gap: what stands between the sign and each name."""
    mark = DSML + gap
    tags = Tags(
        function=f"<{mark}invoke name=",
        function_end=f"</{mark}invoke>",
        parameter=f"<{mark}parameter name=",
        parameter_end=f"</{mark}parameter>",
        block_end=f"</{mark}{name}>",
        quote='"',
        says_types=True,
    )
    return Notation(
        partial(block, tags=tags),
        opens=(f"<{mark}{name}>",),
        closes=(tags.block_end,),
        inner=(DSML,),
        blocks=(block_of(tags),),
    )


V3_2 = _notation("function_calls")
V4 = _notation("tool_calls")
V4_1 = _notation("calls", gap=" ")


def parse_tool_call(text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Of whichever version; what stands between the marks is not always enough to tell."""
    for notation in (V3_2, V4, V4_1):
        with suppress(ValueError):
            return parsed(notation, text, tools)
    raise ValueError("there is no call")
