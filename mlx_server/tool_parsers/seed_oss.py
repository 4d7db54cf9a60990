"""Seed-OSS: `<seed:tool_call><function=f><parameter=key>value</parameter></function>` and so on."""

from functools import partial

from mlx_server.tool_parsers.call_format import CallFormat, parse_calls
from mlx_server.tool_parsers.tags import TagSyntax, block, block_of

TAGS = TagSyntax(
    function="<function=",
    function_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    block_end="</seed:tool_call>",
)

SEED_OSS = CallFormat(
    partial(block, tags=TAGS),
    opens=("<seed:tool_call>",),
    closes=(TAGS.block_end,),
    blocks=(block_of(TAGS),),
)

parse_tool_call = partial(parse_calls, SEED_OSS)
