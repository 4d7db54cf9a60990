"""Hunyuan A13B and the dense ones: `<think>`, `<answer>`, an array of calls in `<tool_calls>`."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.prompts.history_rendering import as_json_array
from mlx_server.tool_parsers.formats import TOOL_CALLS

HUNYUAN = ModelFamily(
    name="hunyuan",
    layout=MarkupLayout(call_formats=(TOOL_CALLS,), dropped=("<answer>", "</answer>")),
    answer_prefix="\n</think>\n<answer>\n",
    write_calls=as_json_array(*TOOL_CALLS.opens, *TOOL_CALLS.closes),
    model_types=("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    stop_tokens=("<|eos|>",),
    special_tokens=("<|startoftext|>", "<|extra_0|>", "<|extra_4|>", "<|eos|>"),
)
