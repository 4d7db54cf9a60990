"""Models of no known family: their own chat template, `<think>`, calls as JSON.

The JSON is in Hermes' tags, or it is the whole answer, as one object or as an array.
"""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.formats import HERMES, PLAIN_ARRAY, PLAIN_OBJECT

LAYOUT = MarkupLayout(call_formats=(HERMES, PLAIN_OBJECT, PLAIN_ARRAY))

PLAIN = ModelFamily(
    name="plain",
    layout=LAYOUT,
    answer_prefix="\n</think>\n\n",
    stop_tokens=("<|role_end|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_turn|>"),
)
