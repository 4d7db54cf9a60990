"""Models of no known family: their own chat template, `<think>`, calls as JSON.

The JSON is in Hermes' tags, or the whole answer is a call, an object or an array.
"""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup import MarkupLayout
from mlx_server.tool_parsers import marked_json
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.hermes import HERMES
from mlx_server.tool_parsers.json_calls import JsonCallForm

FORM = JsonCallForm(arguments="(arguments|parameters)")

OBJECT = CallFormat(
    marked_json.objects,
    begins=("{",),
    repairs=("unmarked",),
    blocks=(marked_json.bare_block(FORM),),
)
ARRAY = CallFormat(
    marked_json.array,
    begins=("[",),
    repairs=("unmarked",),
    blocks=(marked_json.bare_array(FORM),),
)

LAYOUT = MarkupLayout(call_formats=(HERMES, OBJECT, ARRAY))

PLAIN = ModelFamily(name="plain", layout=LAYOUT, answer_prefix="\n</think>\n\n")
