"""Seed-OSS: `<seed:tool_call><function=f><parameter=key>value</parameter></function>` and so on."""

from functools import partial

from mlx_server.tool_parsers.call_format import Notation, parsed
from mlx_server.tool_parsers.tags import Tags, block, block_of

TAGS = Tags(
    function="<function=",
    function_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    block_end="</seed:tool_call>",
)

SEED_OSS = Notation(
    partial(block, tags=TAGS),
    opens=("<seed:tool_call>",),
    closes=(TAGS.block_end,),
    blocks=(block_of(TAGS),),
)

parse_tool_call = partial(parsed, SEED_OSS)
