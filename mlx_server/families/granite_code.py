"""Granite 20B for functions: each call follows an opening delimiter that has no closing one."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import GRANITE_CODE as CALLS

GRANITE_CODE = ModelFamily(
    name="granite_code",
    layout=MarkupLayout(reasoning=(), call_formats=(CALLS,)),
    model_types=("gpt_bigcode",),
    template_markers=CALLS.opens,
    stop_tokens=("<|endoftext|>",),
    special_tokens=("<|endoftext|>",),
)
