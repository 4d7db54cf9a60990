"""DeepSeek's markup language from V3.2 on: `<｜DSML｜invoke name="f">` and parameters that say
whether they are text or JSON, in a block that every version calls by another name.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import CallFormat, parse_calls
from mlx_server.tool_parsers.tags import TagSyntax, block, block_of

DSML = "｜DSML｜"


def _call_format(name: str, gap: str = "") -> CallFormat:
    """gap: what stands between the sign and each name."""
    mark = DSML + gap
    tags = TagSyntax(
        function=f"<{mark}invoke name=",
        function_end=f"</{mark}invoke>",
        parameter=f"<{mark}parameter name=",
        parameter_end=f"</{mark}parameter>",
        block_end=f"</{mark}{name}>",
        quote='"',
        says_types=True,
    )
    return CallFormat(
        partial(block, tags=tags),
        opens=(f"<{mark}{name}>",),
        closes=(tags.block_end,),
        inner=(DSML,),
        blocks=(block_of(tags),),
    )


V3_2 = _call_format("function_calls")
V4 = _call_format("tool_calls")
V4_1 = _call_format("calls", gap=" ")


def parse_tool_call(text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Of whichever version; what stands between the marks is not always enough to tell."""
    for notation in (V3_2, V4, V4_1):
        with suppress(ValueError):
            return parse_calls(notation, text, tools)
    raise ValueError("there is no call")
