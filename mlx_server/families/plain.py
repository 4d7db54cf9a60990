"""Models of no known family: their own chat template, `<think>`, calls as JSON.

The JSON stands between Hermes' marks, or the whole answer is a call, an object or an array.
"""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup import Layout
from mlx_server.tool_parsers import marked_json
from mlx_server.tool_parsers.call_format import Notation
from mlx_server.tool_parsers.hermes import HERMES
from mlx_server.tool_parsers.json_calls import Form

FORM = Form(arguments="(arguments|parameters)")

OBJECT = Notation(
    marked_json.objects,
    begins=("{",),
    mends=("unmarked",),
    blocks=(marked_json.bare_block(FORM),),
)
ARRAY = Notation(
    marked_json.array,
    begins=("[",),
    mends=("unmarked",),
    blocks=(marked_json.bare_array(FORM),),
)

LAYOUT = Layout(notations=(HERMES, OBJECT, ARRAY))

PLAIN = ModelFamily(name="plain", layout=LAYOUT, bridge="\n</think>\n\n")
