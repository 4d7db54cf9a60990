"""MiniMax-M2: `<minimax:tool_call>` around `<invoke name="f">`, `<parameter name="key">`."""

from functools import partial

from mlx_server.tool_parsers.call_format import CallFormat, parse_calls
from mlx_server.tool_parsers.tags import TagSyntax, block, block_of

TAGS = TagSyntax(
    function="<invoke name=",
    function_end="</invoke>",
    parameter="<parameter name=",
    parameter_end="</parameter>",
    block_end="</minimax:tool_call>",
    quote='"',
)

MINIMAX_M2 = CallFormat(
    partial(block, tags=TAGS),
    opens=("<minimax:tool_call>",),
    closes=(TAGS.block_end,),
    blocks=(block_of(TAGS),),
)

parse_tool_call = partial(parse_calls, MINIMAX_M2)
