"""RWKV-7: `<think>`, which prompts may leave without its bracket, and calls in fences of JSON."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup import MarkupLayout
from mlx_server.tool_parsers.formats import HERMES
from mlx_server.tool_parsers.formats import RWKV as TOOL_CALL

RWKV = ModelFamily(
    name="rwkv",
    layout=MarkupLayout(call_formats=(TOOL_CALL, HERMES)),
    answer_prefix="\n</think>\n",
    model_types=("rwkv7",),
)
