"""LFM2 and LFM2.5: ChatML, `<think>`, calls as Python, or as JSON if the prompt asks for it. The
instruct models of LFM2.5 write no delimiters around calls."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.prompts.history_rendering import as_python_list
from mlx_server.tool_parsers.formats import BARE_PYTHON, inline_python
from mlx_server.tool_parsers.formats import LFM2 as CALLS

LAYOUT = MarkupLayout(call_formats=(CALLS, BARE_PYTHON), inline_formats=inline_python)

LFM2 = ModelFamily(
    name="lfm2",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    write_calls=as_python_list("<|tool_call_start|>", "<|tool_call_end|>"),
    model_types=("lfm2", "lfm2_moe", "lfm2-vl", "lfm2_vl"),
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    special_tokens=(
        "<|startoftext|>",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|tool_list_start|>",
        "<|tool_list_end|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<|tool_response_start|>",
        "<|tool_response_end|>",
    ),
)
