"""Qwen's XML-like calls, of Qwen3-Coder and of all from Qwen3.5 on:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Models at times leave out the opening `<tool_call>`.
"""

from functools import partial

from mlx_server.tool_parsers.call_format import CallFormat, parse_calls
from mlx_server.tool_parsers.tags import TagSyntax, block, block_of, function_of, functions

TAGS = TagSyntax(
    function="<function=",
    function_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    block_end="</tool_call>",
    margin="\n",
)

QWEN3_CODER = CallFormat(
    partial(block, tags=TAGS),
    opens=("<tool_call>",),
    closes=(TAGS.block_end,),
    blocks=(block_of(TAGS),),
)

WITHOUT_BLOCK = CallFormat(
    partial(functions, tags=TAGS),
    opens=(TAGS.function,),
    closes=(TAGS.block_end,),
    repairs=("unmarked",),
    blocks=(function_of(TAGS),),
)

parse_tool_call = partial(parse_calls, QWEN3_CODER)
