"""GLM-4.5 and later: `<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>`
for each argument, on lines of their own or not.

GLM is known to stutter: it begins a call twice.

It has a reader of its own, and is no `KeyedCallFormat`: half of this reader is for GLM's slips (a
call begun twice, a name joined to the first key, line breaks as escapes, assignments, examples of
calls within a value, a missing delimiter), which would be eight options that no other record sets.
"""

import re
from functools import partial

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Tool
from mlx_server.repair.model_json import Malformed, UnknownTool
from mlx_server.schemas import unsupported_arguments
from mlx_server.schemas.values import MemberSchema, arguments_of
from mlx_server.tool_parsers import marked_json, values
from mlx_server.tool_parsers.bare_text import bare_value_rule
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat
from mlx_server.tool_parsers.call_writer import ToolCallWriter
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_ahead import read_json
from mlx_server.tool_parsers.json_calls import check_end
from mlx_server.tool_parsers.parameters import UncallableTool, one_by_one_rule
from mlx_server.tool_parsers.source import Into, Lookahead, Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
IN_VALUES = (VALUE_END, CLOSE, KEY_END, KEY, OPEN, f"\n{KEY}", f"\n{CLOSE}")
"""Delimiters that may mean something inside of a value, with the line break before them."""
NAME = re.compile(r"[^<{\n]+")
ESCAPED_LINE = "\\n"
"""A line break that was written as in a JSON string."""
AFTER_VALUE = (KEY, CLOSE, ESCAPED_LINE + KEY, ESCAPED_LINE + CLOSE)
ASSIGNMENT = re.compile(r"""\b(\w+)=("[^"\\]*"|'[^'\\]*'|[^\s"'=,]+)(?:,? +|$)""")


def _read_block(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.space()
    if (yield from source.accept("{")):
        calls.misplaced += ("format",)
        yield from marked_json.objects(source, calls, (CLOSE,))
        return
    is_over = yield from _read_call(source, calls)
    while not is_over and (yield from source.peek()):
        is_over = yield from _read_call(source, calls, is_another=True)


def _read_call(source: Source, calls: ToolCallEmitter, *, is_another: bool = False) -> Steps[bool]:
    """Reads a call; returns whether its block is over. is_another: whether it is not the block's
    first."""
    name, delimiter, key = yield from _read_name(source, calls)
    if delimiter == CLOSE and (assigned := _assigned(name, calls)):
        _write_assigned(*assigned, calls)
        return True
    call = calls.start(name)
    if is_another or key or delimiter == "{":
        call.repaired("format")
    while delimiter == KEY:
        delimiter = yield from _read_argument(source, call, key)
        key = ""
    if delimiter == "{":
        yield from values.arguments(source, JSON, lambda: call, (CLOSE,))
        yield from check_end(source, call, (CLOSE,))
        yield from source.space()
        delimiter = yield from source.accept(CLOSE)
    call.finish()
    return delimiter == CLOSE


def _read_name(source: Source, calls: ToolCallEmitter) -> Steps[tuple[str, str, str]]:
    """Reads a name and the delimiter after it, and the first key if no delimiter precedes it."""
    while True:
        pieces: list[str] = []
        yield from source.space()
        yield from source.match(NAME, pieces.append)
        name = "".join(pieces)
        if name.endswith(ESCAPED_LINE) and calls.knows(name.removesuffix(ESCAPED_LINE)):
            name = name.removesuffix(ESCAPED_LINE)
            calls.misplaced += ("format",)
        if _assigned(name, calls):
            yield from source.space()
            return name, (yield from source.expect(CLOSE)), ""
        if name and not calls.knows(name):
            tool, key = calls.tool_and_key(name)
            if not (tool and (yield from source.comes(KEY_END))):
                raise UnknownTool(name)
            return tool, KEY, key
        yield from source.space()
        delimiter = yield from source.accept(KEY, CLOSE, "{")
        if delimiter or (yield from source.stopped()):
            return name, delimiter, ""
        yield from source.expect(OPEN)  # the call begins again


def _assigned(text: str, calls: ToolCallEmitter) -> tuple[str, dict[str, str]] | None:
    """Finds a tool and its arguments in a text that is `name key=value key=value` and nothing
    else."""
    name, space, rest = text.strip().partition(" ")
    if not space or calls.knows(text.strip()) or not calls.knows(name):
        return None
    if ASSIGNMENT.sub("", rest.strip()):  # there is something between them
        return None
    found = ASSIGNMENT.findall(rest)
    keys = [key for key, _ in found]
    is_sure = len(keys) == len({*keys}) and calls.parameters(name).issuperset(keys)
    return (name, dict(found)) if is_sure else None


def _write_assigned(name: str, arguments: dict[str, str], calls: ToolCallEmitter) -> None:
    call = calls.start(name)
    call.repaired("format")
    for key, written in arguments.items():
        is_quoted = len(written) > 1 and written[0] in "\"'" and written[0] == written[-1]
        call.untyped(key, written[1:-1] if is_quoted else written)
    call.finish()


def _read_argument(source: Source, call: ToolCallWriter, key: str) -> Steps[str]:
    """Reads an argument; returns the delimiter after it. key: its key, if that was read."""
    pieces = [key]
    delimiter = yield from source.up_to(KEY_END, "\n", VALUE, into=pieces.append)
    key = "".join(pieces).strip()
    yield from source.space()
    if delimiter not in (KEY_END, VALUE):
        yield from source.expect(VALUE)
    elif delimiter == VALUE or (yield from source.accept(VALUE, ESCAPED_LINE + VALUE)) != VALUE:
        call.repaired("format")
        if (yield from source.comes(KEY, CLOSE)):  # a key without a value
            return (yield from source.expect(KEY, CLOSE))
    if call.streams(key):
        delimiter = yield from _read_value(source, call, key, partial(call.text, key))
        call.end_text(key)
        return delimiter
    pieces = [(yield from read_json(source))]
    delimiter = yield from _read_value(source, call, key, pieces.append)
    call.untyped(key, "".join(pieces))
    return delimiter


def _read_value(source: Source, call: ToolCallWriter, key: str, into: Into) -> Steps[str]:
    """Reads a value, which may contain the delimiters that would end it, and passes it on. Returns
    the delimiter after it; empty if another call follows at once."""
    inside, is_example = 0, False
    """The number of arguments that begin within the value, and whether a whole call does."""
    while delimiter := (yield from source.up_to(*IN_VALUES, into=into)):
        bare = delimiter.lstrip("\n")
        if bare == KEY_END:
            delimiter += yield from source.space()
            begun = yield from source.accept(VALUE)
            inside += bool(begun)
            delimiter += begun
        elif inside:
            inside -= bare == VALUE_END
        elif bare == OPEN:
            is_example = True
        elif bare == KEY:
            awaited = (each + KEY_END for each in call.awaited - {key})
            if not is_example and (yield from source.comes(*awaited)):
                call.repaired("format")
                return KEY
        else:
            space = yield from source.space()
            if bare == VALUE_END and (following := (yield from source.accept(*AFTER_VALUE))):
                if following not in (KEY, CLOSE):
                    call.repaired("format")
                return following.removeprefix(ESCAPED_LINE)
            if (yield from source.comes(OPEN)) or (yield from source.stopped()):
                if bare == CLOSE:
                    call.repaired("format")
                return CLOSE
            if bare == VALUE_END and (yield from _is_call(source.lookahead(), call)):
                return ""
            if bare == VALUE_END and (yield from _is_brace(source.lookahead())):
                call.repaired("format")
                source.take(1)
                yield from source.space()
                return (yield from source.expect(CLOSE))
            delimiter += space
        into(delimiter)
    raise Malformed("a value without an end")


def _is_brace(ahead: Lookahead) -> Steps[bool]:
    """Whether a brace follows that closes nothing, and after it the end of the block."""
    brace = yield from ahead.accept("}")
    yield from ahead.space()
    return bool(brace) and bool((yield from ahead.accept(CLOSE)))


def _is_call(ahead: Lookahead, call: ToolCallWriter) -> Steps[bool]:
    """Whether another call follows, without the delimiter before it."""
    name = (yield from ahead.run(NAME)).strip()
    yield from ahead.space()
    return call.knows(name) and bool((yield from ahead.accept(KEY, CLOSE)))


def _call_of(lark: Lark, tool: Tool) -> str:
    if not NAME.fullmatch(tool.name) or tool.name != tool.name.strip():
        raise UncallableTool(f"the name of the tool {tool.name!r}")
    space = lark.terminal(r"/\n[\x20\n]?/")  # other white space would be part of the name

    def written(member: MemberSchema) -> str | None:
        key = member.key
        if key != key.strip() or "\n" in key or KEY_END in key:
            return None
        name = f"{lark.text(KEY)} {quoted(key)} {lark.text(KEY_END)} {space}? {lark.text(VALUE)}"
        return f"{space}? {name} {bare_value_rule(member.value, lark, VALUE_END, CLOSE, KEY_END)}"

    arguments = one_by_one_rule(arguments_of(tool), written, lark)
    return lark.rule(f"{quoted(tool.name)} {arguments}")


GLM = CallFormat(
    _read_block,
    opens=(OPEN,),
    closes=(CLOSE,),
    inner=(KEY, KEY_END, VALUE, VALUE_END),
    ends_answer=True,
    blocks=(
        BlockGrammar(
            _call_of,
            after=CLOSE,
            unsupported=unsupported_arguments.unsupported_as_text,
            space=r"\n?",
        ),
    ),
)
