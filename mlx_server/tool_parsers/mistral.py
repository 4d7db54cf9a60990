"""`[TOOL_CALLS]`: before an array of JSON calls, or before each `name[CALL_ID]id[ARGS]{...}`."""

import re
import secrets
import string
from functools import partial
from typing import Any

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.grammars.schema import arguments
from mlx_server.messages import Tool
from mlx_server.repair.jsonish import loads
from mlx_server.tool_parsers import marked_json, pythonic, values
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat, parse_calls
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import COLON, GAP, JsonCallForm, as_object, repaired
from mlx_server.tool_parsers.parameters import UncallableTool
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON

OPEN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

ID_PATTERN = re.compile(r"[a-zA-Z0-9]+")


def new_id() -> str:
    """The templates of many Mistral models refuse ids of any other form."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _read_block(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.space()
    match (yield from source.accept("[", "{")):
        case "[":
            yield from marked_json.array(source, calls)
        case "{":
            yield from marked_json.objects(source, calls)
        case _:
            yield from _named(source, calls)


def _named(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    name = yield from pythonic.word(source, pythonic.NAME)
    id = ""
    if (yield from source.accept(ID)):
        id = yield from pythonic.word(source, ID_PATTERN)
    yield from source.accept(ARGUMENTS)  # which the first models of this notation leave out
    yield from source.space()
    yield from source.expect("{")
    call = calls.start(name, id)
    yield from values.arguments(source, JSON, lambda: call)
    call.finish()


def _repaired(text: str) -> list[tuple[str, dict[str, Any]]]:
    head, brace, rest = text.partition("{")
    name = head.partition(ID)[0].partition(ARGUMENTS)[0].strip()
    if not name or name.startswith("["):
        return repaired(text)
    return [(name, as_object(loads(brace + rest)))]


def _named_call(lark: Lark, tool: Tool) -> str:
    if not pythonic.NAME.fullmatch(tool.name):
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    id = f"({lark.text(ID)} {lark.terminal('/[a-zA-Z0-9]{9}/')})?"
    made = arguments(tool.parameters, lark, strict=tool.strict)
    return f"{quoted(tool.name)} {id} ({lark.text(ARGUMENTS)})? {made}"


FORM = JsonCallForm(between=rf'("id"{COLON}"[a-zA-Z0-9]{{9}}",{GAP})?')

MISTRAL = CallFormat(
    _read_block,
    opens=(OPEN,),
    inner=(ID, ARGUMENTS),
    repair=_repaired,
    blocks=(BlockGrammar(_named_call), marked_json.array_block(FORM)),
)

parse_tool_call = partial(parse_calls, MISTRAL)
