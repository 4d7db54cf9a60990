"""Recognises tool calls that a model writes as JSON where its call format has no place for them.

JSON is a call if it names a tool of the request and its arguments fit that tool's schema. It has
to be all that a code fence holds, or the end of the message. For families whose own calls are bare
JSON, and in reasoning after which nothing comes, it may stand anywhere in a text. Until a call is
certain the text is held; JSON whose first key or name is no call's is passed on at once.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from mlx_server import limits
from mlx_server.events import Event, RepairKind
from mlx_server.grammars.arguments import fits
from mlx_server.grammars.view import properties_in
from mlx_server.messages import Tool
from mlx_server.requests import RepairPolicy
from mlx_server.tool_parsers.call_format import finished_calls, read_block
from mlx_server.tool_parsers.call_repair import (
    CALL_KEYS,
    NAME_KEYS,
    FoundCall,
    match_tool_name,
    read_arguments,
    read_as,
    read_calls,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter, coerce_arguments
from mlx_server.tool_parsers.formats import PYTHON_LINES
from mlx_server.tool_parsers.model_json import Malformed
from mlx_server.tool_parsers.source import Lookahead, Source, Steps, complete_source, discard
from mlx_server.tool_parsers.values import json_size

LEADS_ON = frozenset(".!?:。！？：")
"""The characters that may end the text before a call on its line."""
IsProse = Callable[[Lookahead], Steps[bool]]

FENCE = "```"
PYTHON_LANGUAGE = "tool_code"
"""The language of fences in which models write calls as Python."""
LANGUAGES = ("json", "tool_calls", "tool_call", PYTHON_LANGUAGE, "function_call", "jsonc", "json5")
ASSIGNED = f"{PYTHON_LANGUAGE} = "
"""The beginning of a call in Python that has no fence."""
BEGINNINGS = ("{", "[", FENCE, ASSIGNED)
IN_TEXT = (FENCE, f"\n{FENCE}", "\n{", "\n[", "{", "[{")
"""Texts after which JSON calls may begin in the middle of a text."""

KEY = re.compile(r"[^\"'\\\n]+")
PRINTED = re.compile(r"print\((.*)\)", re.DOTALL)
NAMED = re.compile(r"(\w+)\s*=\s*")
"""Matches the beginning of a call whose result gets a name, which may be printed."""
SEPARATORS = re.compile(r"[\s,;]+")

BEFORE_NAME = re.compile(r"""[\s<{"'`]*+(?>function\b)?+[\s=]*+(?>name\b)?+[\s="'`]*+""")
"""What models write before a tool's name at the beginning of a block."""
AROUND_NAME = re.compile(r"""[\s<{"'`=]+""")
TOOL_NAME = re.compile(r"[\w.\-]+")
ELEMENT = re.compile(r"""\s*+<(?>(param(?:eter)?)(?:=|\sname=))?+["']?+([\w.\-]+)["']?+>""")


class MisplacedCallReader:
    """Finds the calls, and emits them once all of them are certain."""

    def __init__(
        self,
        calls: ToolCallEmitter,
        tools: Sequence[Tool],
        allowed: RepairPolicy,
        *,
        makes: bool,
        closes: Sequence[str] = (),
        inline: bool = False,
    ) -> None:
        """makes: whether such calls are made. closes: delimiters that may follow a call. inline:
        whether text may follow it too."""
        starts = ("{}(", "{}{{", "{} {{")
        named = tuple(start.format(tool.name) for tool in tools for start in starts)
        self.beginnings = (*BEGINNINGS, *named) if makes and tools else ()
        self.in_text = IN_TEXT if makes and tools else ()
        self._closes = tuple(closes)
        self._inline = inline
        self._calls = calls
        self._tools = {tool.name: tool for tool in tools}
        self._named = named
        self._allowed = allowed
        self._seen = 0
        """The position in the source up to which the text was found to be no call."""

    def read(
        self, source: Source, already: str = "", before: str = "", is_prose: IsProse | None = None
    ) -> Steps[bool]:
        """Reads calls, and emits them. If there are none, the source is unread. already: what was
        read of them. before: the text on their line, after which calls come only if it is complete.
        is_prose: finds out whether they are shown in inline code."""
        is_in_line = already.startswith(("{", "[{")) and not self._inline
        if is_in_line and before.strip() and before.rstrip()[-1] not in LEADS_ON:
            return False
        if source.position < self._seen:
            return False
        calls, size = yield from self._ahead(source, already, inline=self._inline)
        if calls and is_prose:
            calls = [] if (yield from is_prose(source.lookahead(size))) else calls
        if not calls:
            self._seen = source.position + size
            return False
        source.take(size)
        self.emit(calls, "unmarked")
        return True

    def read_nameless(self, source: Source) -> Steps[bool]:
        """Reads arguments without a name that only one tool can take, and emits the call."""
        if not (yield from source.after_space("{")):
            return False
        text = yield from source.lookahead().text_up_to()
        call = None if source.cut else self._calls.nameless(text)
        if not call:
            return False
        source.take(len(text))
        self.emit([call], "name")
        return True

    def at_end_of(self, text: str) -> list[FoundCall]:
        """Returns the last calls of a complete text, such as reasoning."""
        if not self.beginnings:
            return []
        source = complete_source(text)
        steps = self._at_end_of(source)
        try:
            next(steps)
        except StopIteration as end:
            calls: list[FoundCall] = end.value
            return calls
        raise AssertionError("a complete source has nothing to wait for")

    def _at_end_of(self, source: Source) -> Steps[list[FoundCall]]:
        end, already, is_apart = 0, "", False
        calls: list[FoundCall] = []
        yield from source.space()
        while already or (yield from source.peek()):
            ahead = list[FoundCall]()
            is_new = source.position >= end
            if already or (is_new and (yield from source.comes(*self.beginnings))):
                ahead, size = yield from self._ahead(source, already, inline=True)
                end = source.position + size
            if ahead:
                source.take(size)
                yield from source.space()
                calls, already = [*(() if is_apart else calls), *ahead], ""
                is_apart = False
            else:
                is_apart = True
                already = yield from source.up_to(*self.in_text, into=discard)
        return calls

    def emit(self, calls: Sequence[FoundCall], *where: RepairKind) -> None:
        self._calls.misplaced = where
        for call in calls:
            if call.has_mistakes:
                self._calls.add_repaired([(call.name, call.arguments)])
            else:
                self._calls.whole(call.name, call.arguments, call.id)

    def _ahead(
        self, source: Source, already: str, *, inline: bool
    ) -> Steps[tuple[list[FoundCall], int]]:
        """Returns the calls that the source begins with, none if it begins with anything else, and
        the number of characters looked at. Nothing is taken. inline: whether text may follow."""
        copy = Source()
        copy.feed(already)
        steps, fed = self._message(copy, inline=inline), 0
        while True:
            new = source.ahead(fed)
            fed += len(new)
            copy.feed(new)
            if source.closed and not copy.closed:
                copy.close(cut=source.cut)
            try:
                next(steps)
            except StopIteration as end:
                return end.value, copy.position - len(already)
            except Malformed:
                return [], copy.position - len(already)
            yield

    def _message(self, source: Source, *, inline: bool) -> Steps[list[FoundCall]]:
        """Reads the calls in a code fence, or those after which the message ends."""
        if (yield from source.accept_spaced(FENCE)):
            return (yield from self._fence(source))
        if (yield from source.comes(ASSIGNED)):
            return (yield from self._python(source))
        if (yield from source.comes(*self._named)):
            return (yield from self._named_calls(source))
        calls = yield from self._values(source)
        if inline:
            return calls
        while (yield from source.peek()):
            if (yield from source.accept(*self._closes)):
                yield from source.space()
            elif (yield from source.accept(FENCE)):
                calls += yield from self._fence(source)
                yield from source.space()
            else:
                calls += yield from self._values(source)
        if source.cut:
            raise Malformed("the model may have had more to write")
        return calls

    def _fence(self, source: Source) -> Steps[list[FoundCall]]:
        """Reads the calls in a code fence, after its opening."""
        language = yield from source.accept(*LANGUAGES)
        yield from source.space()
        is_json = yield from source.comes("{", "[{", "[ ", "[\n")
        if language == PYTHON_LANGUAGE and not is_json:
            return (yield from self._python(source, FENCE))
        calls = yield from self._values(source)
        yield from source.expect(FENCE)
        return calls

    def _python(self, source: Source, *ends: str) -> Steps[list[FoundCall]]:
        """Reads the calls up to the end of a fence or, without `ends`, of the message, as
        Python."""
        code, end = yield from source.text_up_to(*ends)
        if not end and (ends or source.cut):
            raise Malformed("the model may have had more to write")
        calls = python_calls(code.strip(), tuple(self._tools.values()))
        self._check(calls)
        return calls

    def _named_calls(self, source: Source) -> Steps[list[FoundCall]]:
        """Reads a message that is a call, or several in Python, and begins with a tool's name."""
        text, gap = yield from source.text_up_to("\n\n")
        yield from source.space()
        if source.cut or (gap and (yield from source.peek())):
            raise Malformed("more than calls")
        try:
            calls = python_calls(text.strip(), tuple(self._tools.values()))
        except Malformed:
            calls = named_calls(text, self._tools, repairs=self._allowed.mistakes)
        self._check(calls)
        return calls

    def _values(self, source: Source) -> Steps[list[FoundCall]]:
        """Reads one or more JSON values, with nothing but commas, semicolons or space between
        them."""
        calls: list[FoundCall] = []
        while (yield from source.comes("{", "[")):
            source.keep()
            yield from self._head(source)
            few = read_calls(source.kept(), self._tools.keys(), repairs=self._allowed.mistakes)
            self._check(few)
            calls += few
            yield from source.match(SEPARATORS, discard)
        if not calls:
            raise Malformed("no JSON")
        return calls

    def _check(self, calls: Sequence[FoundCall]) -> None:
        for call in calls:
            name = self._calls.meant(call.name)
            if name is None:
                raise Malformed("there is no such tool")
            schema = self._tools[name].parameters
            if not fits(coerce_arguments(call.arguments, schema, self._allowed), schema):
                raise Malformed("the arguments do not fit the tool's schema")

    def _head(self, source: Source) -> Steps[None]:
        """Reads a value. Malformed as soon as its first key or its name is no call's."""
        depth = 0
        while (yield from source.accept("[")):
            depth += 1
            yield from source.space()
        yield from source.expect("{")
        depth += 1
        yield from source.space()
        key = yield from self._short_string(source)
        if key not in CALL_KEYS and key not in self._tools:
            raise Malformed("no call has such a key")
        yield from source.expect_spaced(":")
        yield from source.space()
        if key in NAME_KEYS and (yield from source.comes('"', "'")):
            name = yield from self._short_string(source)
            if self._calls.meant(name) is None:
                raise Malformed("there is no such tool")
        size = yield from json_size(source, depth, quotes="\"'")
        source.take(size or limits.READ_JSON_CHARACTERS)
        if not size:
            raise Malformed("too long to be read, or without an end")

    def _short_string(self, source: Source) -> Steps[str]:
        """Reads a short string without escapes."""
        quote = yield from source.expect('"', "'")
        text = yield from source.run(KEY)
        yield from source.expect(quote)
        return text


def python_calls(code: str, tools: Sequence[Tool]) -> list[FoundCall]:
    """Returns the calls that code consists of, each of which may be printed."""
    if named := NAMED.match(code):
        code = _without_print(code[named.end() :], named[1])
    printed = PRINTED.fullmatch(code)
    source, events = complete_source(printed[1] if printed else code), list[Event]()
    read_block(PYTHON_LINES, source, tools, events)
    return [FoundCall(call["name"], call["arguments"]) for call in finished_calls(events)]


def named_calls(text: str, tools: Mapping[str, Tool], *, repairs: bool) -> list[FoundCall]:
    """Returns the call that a text consists of: the name of a tool, and arguments in JSON or in
    elements such as `<city>Bern</city>`. In Python there may be several."""
    begin = BEFORE_NAME.match(text)
    written = TOOL_NAME.match(text, begin.end() if begin else 0)
    name = match_tool_name(written[0], tools) if written else None
    if not written or name is None:
        raise Malformed("there is no such tool")
    rest = text[written.end() :].strip()
    for end in ("</function>", f"</{written[0]}>"):
        rest = rest.removesuffix(end).rstrip()
    if rest.startswith("("):
        inside = rest[1:].removesuffix(")").strip()
        if not inside.startswith("{"):
            return python_calls(name + rest, tuple(tools.values()))
        rest = inside
    rest = rest.lstrip("\"'`:> \t\r\n")
    if rest.startswith(","):
        rest = "{" + rest[1:]  # {"name="f", "arguments": {...}}
    if rest.startswith("{"):
        return [FoundCall(name, read_arguments(rest, repairs=repairs)[0])]
    return [FoundCall(name, _elements(rest, tools[name]))]


def _elements(text: str, tool: Tool) -> dict[str, object]:
    """Returns the arguments that are the elements of a text, each called like a parameter."""
    arguments: dict[str, object] = {}
    known, at = properties_in(tool.parameters), 0
    while opening := ELEMENT.match(text, at):
        key, end = opening[2], f"</{opening[1] or opening[2]}>"
        closed = text.find(end, opening.end())
        if closed < 0 or key not in known:
            raise Malformed("an element that is no argument")
        value = text[opening.end() : closed].removeprefix("\n").removesuffix("\n")
        arguments[key] = read_as(value, tool.parameters, key)
        at = closed + len(end)
    if text[at:].strip() or not arguments:
        raise Malformed("more than arguments in a call")
    return arguments


def _without_print(code: str, name: str) -> str:
    """Returns the code without its last line, if that prints the variable."""
    call, printed, rest = code.rpartition("print(")
    value = call.rstrip()
    is_printed = printed and rest.endswith(")") and rest[:-1].strip() == name
    return value if is_printed and "\n" in call[len(value) :] else code
