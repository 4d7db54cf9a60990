"""A call as one JSON object, `{"name": "f", "arguments": {...}}`, with its variations.

Such objects stand alone, between delimiters, or in an array, perhaps in a fence.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_server.grammars.formats import arguments, call_json
from mlx_server.grammars.grammar import SPACE
from mlx_server.grammars.lark import Lark, literally
from mlx_server.messages import Tool
from mlx_server.tool_parsers import values
from mlx_server.tool_parsers.call_format import (
    BlockGrammar,
    CallFormat,
    UnmarkedBlockGrammar,
    one_of,
)
from mlx_server.tool_parsers.call_repair import (
    CALL_KEYS,
    EMPTY_KEYS,
    calls_of,
    name_text,
    read_calls,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter, ToolCallWriter
from mlx_server.tool_parsers.model_json import Malformed, loads
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.values import JSON

NAMES = ("name", "function_name", "tool_name")
ARGUMENTS = ("arguments", "parameters", "args", "input")
FRAMES = ("type", "id", "index", "function", "tool_call_id")
"""Other members that may stand in such an object."""

GOES_ON = ("{", "[", "]", ",", ";", "```")
"""Texts that may follow a call in a block."""

GAP = f"({SPACE})?"
CLOSING = rf"/{GAP}\}}/"
COLON = f"{GAP}:{GAP}"


UNREAD = re.compile(r"""(["']\s*)?([{}\[\]])""")
"""A bracket, and the quote before it."""


def call_object(
    source: Source, calls: ToolCallEmitter, closes: tuple[str, ...] | None = None
) -> Steps[None]:
    """Reads one call after the opening brace; its arguments stream if its name comes first.

    closes: the delimiters that may follow; None if nothing may.
    """
    yield from _call_object(source, calls, None, frame=("function",), closes=closes)


def read_json_arguments(
    source: Source, start: Callable[[], ToolCallWriter], closes: tuple[str, ...]
) -> Steps[ToolCallWriter]:
    """Reads arguments after their opening brace. closes: the delimiters that may follow."""
    # a bracket among them ends values too
    own = tuple(each for each in closes if each.strip("{[()]}"))
    call = yield from values.arguments(source, JSON, start, own)
    yield from check_end(source, call, closes)
    return call


def check_end(source: Source, call: ToolCallWriter | None, closes: tuple[str, ...]) -> Steps[None]:
    """Reads surplus closing braces after a call. Malformed if a string of the call has ended at a
    quote that was not escaped: then more of the call follows."""
    while "}" not in closes and (yield from source.after_space("}")):
        yield from source.expect_spaced("}")
        if call:
            call.repaired()
    ahead = source.lookahead()
    sign = yield from ahead.accept_spaced(*closes, *GOES_ON)
    if sign and sign in ",;":
        sign = yield from ahead.accept_spaced(*GOES_ON)
    if not sign:
        rest = yield from ahead.text_up_to(*closes)
        if _closes_string(rest):
            raise Malformed("a quote in a string was not escaped")


def _lacks_its_brace(source: Source, closes: tuple[str, ...]) -> Steps[bool]:
    """Whether the array or the block around a call ends before the call's last brace."""
    ahead = source.lookahead()
    literal = yield from ahead.accept_spaced("]", *closes)
    if literal != "]" or literal in closes:
        return bool(literal)
    if (yield from ahead.accept_spaced(*closes)):
        return True
    return not _closes_string((yield from ahead.text_up_to(*closes)))


def _closes_string(rest: str) -> bool:
    """Whether a text ends a string that began before it, and an object or array around the string:
    then an unescaped quote has ended the string too early."""
    depth = 0
    for match in UNREAD.finditer(rest):
        depth += 1 if match[2] in "{[" else -1
        if depth < 0 and match[1]:
            return True
    return False


def _call_object(
    source: Source,
    calls: ToolCallEmitter,
    id: str | None,
    frame: tuple[str, ...],
    closes: tuple[str, ...] | None = None,
) -> Steps[None]:
    """frame: the keys under which the call itself may stand, as an inner object."""
    name, call, framed = "", None, False
    held: list[Any] = []
    while True:
        yield from source.space()
        key = yield from values.key_of(source, JSON)
        twice = (key in NAMES and name) or (key in ARGUMENTS and held)
        if twice or (key in (*NAMES, *ARGUMENTS) and (call or framed)):
            raise Malformed("two calls in one")
        if key in ARGUMENTS and name and (yield from source.accept("{")):
            start = partial(calls.start, name, id)
            call = yield from values.arguments(source, JSON, start, closes or ())
        elif key in NAMES:
            name = name_text((yield from values.value(source, JSON)))
            calls.check_name(name)
        elif key in ARGUMENTS:
            held.append((yield from values.value(source, JSON)))
        elif key in frame and not (framed or name) and (yield from source.accept("{")):
            framed = True
            yield from _call_object(source, calls, id, frame=())
        elif key in FRAMES:
            value = yield from values.value(source, JSON)
            id = value if key == "id" and isinstance(value, str) else id
        else:
            raise Malformed(f"no call has a key {key!r}")
        if call and closes is not None and (yield from _lacks_its_brace(source, closes)):
            call.repaired()
            break
        if (yield from source.expect_spaced(",", "}")) == "}":
            break
    if closes is not None:
        yield from check_end(source, call, closes)
    if call:
        call.finish()
    elif name and held:
        calls.whole(name, held[0], id)
    elif name and closes and calls.needs_none(name):
        calls.whole(name, None, id)
    elif not framed:
        raise Malformed("a call needs a name and arguments")


@dataclass(frozen=True)
class JsonCallForm:
    """The form of JSON calls in a grammar."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments",)
    """Any of these keys."""
    before: tuple[str, str] | None = None
    """A member that may stand before the name: its key, and an expression of its text."""
    between: tuple[str, str] | None = None
    """The same, between name and arguments."""

    def call(self, lark: Lark, tool: Tool) -> str:
        return f"{lark.terminal(f'/{self.head(tool)}/')} {self.rest(lark, tool)}"

    def head(self, tool: Tool) -> str:
        """Returns a regular expression of a call up to its tool's name."""
        name = literally(json.dumps(tool.name, ensure_ascii=False))
        return rf'\{{{GAP}{_optional(self.before)}"{self.name}"{COLON}{name}'

    def rest(self, lark: Lark, tool: Tool) -> str:
        keys = self.arguments[0] if len(self.arguments) == 1 else f"({'|'.join(self.arguments)})"
        key = lark.terminal(rf'/{GAP},{GAP}{_optional(self.between)}"{keys}"{COLON}/')
        rule = arguments(tool.parameters, lark, strict=tool.strict)
        for key_of_arguments in self.arguments:
            lark.frame(rule, self._frame(tool, key_of_arguments))
        return f"{key} {rule} {lark.terminal(CLOSING)}"

    def as_json(self, lark: Lark, tool: Tool) -> str:
        frames = ((key, self._frame(tool, key)) for key in self.arguments)
        return one_of(
            call_json(tool.parameters, lark, frame, key, strict=tool.strict)
            for key, frame in frames
        )

    def _frame(self, tool: Tool, key: str) -> dict[str, Any]:
        """Returns the schema of the call, for `Lark.frame`."""
        members = [
            (each[0], {"type": "string", "pattern": f"^{each[1]}$"}) if each else None
            for each in (self.before, self.between)
        ]
        named = (self.name, {"const": tool.name})
        return {
            "type": "object",
            "properties": dict(filter(None, (members[0], named, members[1], (key, {"$ref": "#"})))),
            "required": [self.name, key],
            "additionalProperties": False,
        }


def _optional(member: tuple[str, str] | None) -> str:
    return rf'("{member[0]}"{COLON}"{member[1]}",{GAP})?' if member else ""


def repaired(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the calls in broken JSON, or in the form of another API. They may be the rest of an
    array after its first calls."""
    text = text.lstrip(" \t\r\n,;")
    try:
        calls = read_calls(text, (), repairs=True)
    except Malformed:  # the outer brace is missing, or there is a key of no meaning
        value = loads(text, missing=1, surplus=1)
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, dict) for item in items):
            raise
        calls = calls_of([_known_members(item) for item in items], (), repairs=True)
    return [(call.name, dict(call.arguments)) for call in calls]


def _known_members(call: dict[str, Any]) -> dict[str, Any]:
    inside = call.get("function")
    members = inside if isinstance(inside, dict) else call
    return {k: v for k, v in members.items() if k in CALL_KEYS.difference(EMPTY_KEYS)}


def repaired_by_name(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the calls in a broken list of objects whose only key is a tool's name."""
    listed = loads(text, missing=1)
    items = listed if isinstance(listed, list) else [listed]
    if not all(isinstance(item, dict) and len(item) == 1 for item in items):
        raise Malformed("a call should be an object with one key")
    return [(name, as_object(value)) for item in items for name, value in item.items()]


def as_object(value: Any) -> dict[str, Any]:
    """Returns arguments that came at once as an object; some models write them as text again."""
    members = loads(value) if isinstance(value, str) else value
    if not isinstance(members, dict):
        raise Malformed("arguments should be an object")
    return members


FORM = JsonCallForm()

READ_ON = r"\s*[,;{]"
"""Matches the beginning of a further object, which would be read as a call."""


def marked_json(
    opens: str, closes: str = "", form: JsonCallForm = FORM, fence: str = ""
) -> CallFormat:
    """closes: empty if the end of the JSON is the end of the block. fence: the opening of the block
    of code that models write around all of the JSON."""
    delimiters = (closes,) if closes else ()
    before = "" if opens.endswith("[") else f"{fence}\n[" if fence else "["
    blocks = [array_block(form, closes, before)]
    if closes and not fence:
        blocks.insert(0, BlockGrammar(form.call, between="", after=closes))
    read = partial(_read_block, delimiters)
    return CallFormat(
        read, (opens,), delimiters, repair=repaired, ends_answer=True, blocks=tuple(blocks)
    )


def tagged_json(*tags: str) -> CallFormat:
    """Returns the format of calls in JSON between tags. Models mix them up, or leave the last
    bracket out."""
    closes = tuple(f"</{tag}{end}" for tag in tags for end in (">", ""))
    return CallFormat(partial(_read_block, closes), tuple(f"<{tag}>" for tag in tags), closes)


def marked_object(
    *opens: str, form: JsonCallForm = FORM, follows: tuple[str, ...] = ()
) -> CallFormat:
    """Returns a format with one call after each delimiter, which ends with its JSON. follows:
    delimiters of other parts of an answer, which may come right after it."""
    block = BlockGrammar(form.call, read_on=READ_ON)
    read = partial(_read_object, (*opens, *follows))
    return CallFormat(read, opens, repair=repaired, ends_answer=True, blocks=(block,))


def _read_object(follows: tuple[str, ...], source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.expect_spaced("{")
    yield from call_object(source, calls, follows)


def array_block(form: JsonCallForm, closes: str = "", before: str = "[") -> BlockGrammar:
    return BlockGrammar(form.call, before, between=",", after=("]", closes), may_be_empty=True)


def bare_block(form: JsonCallForm) -> UnmarkedBlockGrammar:
    """Returns a block of one or more objects without delimiters."""
    return UnmarkedBlockGrammar(
        call=form.call,
        between=";",
        read_on=READ_ON,
        head=form.head,
        rest=form.rest,
        as_json=form.as_json,
    )


def bare_array(form: JsonCallForm) -> UnmarkedBlockGrammar:
    return UnmarkedBlockGrammar(
        call=form.call,
        between=",",
        after="]",
        head=lambda tool: rf"\[{GAP}{form.head(tool)}",
        rest=form.rest,
    )


def _read_block(closes: tuple[str, ...], source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.space()
    yield from source.fence()
    if (yield from source.expect_spaced("{", "[")) == "{":
        yield from read_call_objects(source, calls, closes)
    else:
        yield from read_call_array(source, calls, closes)


def read_call_array(
    source: Source, calls: ToolCallEmitter, closes: tuple[str, ...] = ()
) -> Steps[None]:
    """Reads an array after its bracket."""
    if (yield from source.accept_spaced("]")):  # the model has decided to call nothing
        yield from source.accept_spaced(*closes)
        return
    yield from source.expect("{")
    yield from read_call_objects(source, calls, closes)


def read_call_objects(
    source: Source, calls: ToolCallEmitter, closes: tuple[str, ...] = ()
) -> Steps[None]:
    """Reads, after the first brace, a call and those that follow, up to the closing delimiter."""
    yield from call_object(source, calls, closes)
    while True:
        literal = yield from source.accept_spaced("{", ",", ";", "]", "```", *closes)
        if literal == "{":
            yield from call_object(source, calls, closes)
        elif literal in closes or (literal == "]" and not closes):
            return
        elif not literal:
            # complete calls count, but what follows them in the block is not part of them
            if (yield from source.peek()):
                raise Malformed("more than calls between the delimiters")
            return
