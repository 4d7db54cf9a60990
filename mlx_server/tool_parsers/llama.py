"""Llama's calls: bare JSON, `<|python_tag|>{...}`, `<function=f>{...}</function>`, or Python."""

from functools import partial

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.grammars.schema import arguments
from mlx_server.messages import Tool
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers import marked_json, pythonic, values
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat, parse_calls
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import COLON, GAP, JsonCallForm, repaired
from mlx_server.tool_parsers.parameters import UncallableTool
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON


def _tagged(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.space()
    match (yield from source.accept("{", "[")):
        case "{":
            yield from marked_json.objects(source, calls)
        case "[":
            yield from pythonic.bare_list(source, calls)
        case _:
            yield from pythonic.call(source, calls)


def _function(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    name = yield from pythonic.word(source, pythonic.NAME)
    yield from source.expect(">")
    yield from source.space()
    yield from source.expect("{")
    call = calls.start(name)
    yield from values.arguments(source, JSON, lambda: call)
    call.finish()
    yield from source.space()
    if not (yield from source.accept("</function>")) and (yield from source.peek()):
        raise Malformed("more than a call between the marks")


def _function_call(lark: Lark, tool: Tool) -> str:
    if not pythonic.NAME.fullmatch(tool.name):
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    made = arguments(tool.parameters, lark, strict=tool.strict)
    return f"{quoted(tool.name + '>')} {made} {quoted('</function>')}"


FORM = JsonCallForm(arguments="(parameters|arguments)", before=rf'("type"{COLON}"function",{GAP})?')

BARE = CallFormat(
    marked_json.objects,
    begins=("{",),
    repair=repaired,
    blocks=(marked_json.bare_block(FORM),),
)
TAGGED = CallFormat(
    _tagged,
    opens=("<|python_tag|>",),
    repair=repaired,
    blocks=(BlockGrammar(FORM.call, between=";", read_on=marked_json.READ_ON),),
)
FUNCTION = CallFormat(
    _function,
    opens=("<function=",),
    closes=("</function>",),
    blocks=(BlockGrammar(_function_call, space=""),),
)

parse_tool_call = partial(parse_calls, TAGGED)
