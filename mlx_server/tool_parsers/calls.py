"""Turns what a call format reads into the events of an answer's calls.

A call format reports what it finds: a call begins, a parameter has this value, this is a piece of
its text. The events have the arguments' JSON text in pieces, as early as it is certain. Repairs of
a call are reported when it ends, and so is every violation of its tool's schema, since no grammar
may have constrained it.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mlx_server.events import (
    Event,
    Repaired,
    RepairKind,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
)
from mlx_server.grammars.arguments import is_made_of, required, types_of_member
from mlx_server.grammars.view import ALL, properties_in, type_of
from mlx_server.messages import Tool
from mlx_server.requests import ALL_REPAIRS, RepairPolicy
from mlx_server.tool_parsers.call_repair import (
    FoundCall,
    coerced,
    match_tool_name,
    read_arguments,
    read_as,
    read_tree,
    takes_text,
    unwrapped,
)
from mlx_server.tool_parsers.model_json import Malformed, UnknownTool


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def new_short_id() -> str:
    """Makes an id of nine characters: the templates of many Mistral models refuse any other
    form."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


HALVES = re.compile("[\ud800-\udfff]")
"""Matches one half of a surrogate pair."""


def coerce_arguments(
    arguments: Mapping[str, Any], schema: Mapping[str, Any], allowed: RepairPolicy
) -> dict[str, Any]:
    """Converts arguments to the types that the schema asks for, as far as that is allowed."""
    if not allowed.mistakes:
        return dict(arguments)
    return {key: coerced(value, schema, key) for key, value in arguments.items()}


def json_of(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        # an infinite number, or endless lists in lists
        raise Malformed("a value that JSON can't express") from None
    # a lone surrogate is not a character: it stays as the model wrote it
    return HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


Schema = Mapping[str, Any]


def argument_errors(arguments: Mapping[str, Any], schema: Schema) -> Iterator[tuple[str, str]]:
    """Yields the name of each wrong argument, and what is wrong with it."""
    for key in required(schema):
        if key not in arguments:
            yield key, "it is required"
    for key, value in arguments.items():
        types = types_of_member(schema, key)
        if types != ALL and _type(value) not in types:
            named = types - {"integer"} if "number" in types else types
            yield key, f"it should be of type {' or '.join(sorted(named))}"


def _type(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else type_of(value)


Emit = Callable[[Event], None]


class HeldCall:
    """The events of a call that are held back: until its arguments differ from those of the call
    before, or until it is complete."""

    def __init__(self, emit: Emit, before: str | None = None, *, to_its_end: bool = False) -> None:
        """before: the arguments of the call before, if this one may be the same again. to_its_end:
        whether the call is reported only once it is complete."""
        self._emit = emit
        self._before = before
        self._to_its_end = to_its_end
        self._compared = 0
        self._held: list[Event] = []
        self.is_silent = True
        """Whether none of its events has been reported."""

    def emit(self, event: Event) -> None:
        """Takes the next event of the call."""
        self._held.append(event)
        if self._before is not None and not self._is_same(event, self._before):
            self._before = None
        is_certain = not self._to_its_end or isinstance(event, ToolCallFinished)
        if not self.is_silent or (self._before is None and is_certain):
            self.is_silent = False
            held, self._held = self._held, []
            for each in held:
                self._emit(each)

    def retract(self) -> bool:
        """Drops the arguments so far, unless some were reported. Returns whether it did."""
        self._held = [event for event in self._held if not isinstance(event, ToolCallDelta)]
        self._compared = 0
        return self.is_silent

    def _is_same(self, event: Event, before: str) -> bool:
        if isinstance(event, ToolCallDelta):
            at, self._compared = self._compared, self._compared + len(event.arguments)
            return before.startswith(event.arguments, at)
        return not isinstance(event, ToolCallFinished) or self._compared == len(before)


ARGUMENTS = ".function.arguments"


class ToolCallWriter:
    """Writes one call: its arguments are an object, written key by key, and once."""

    def __init__(self, calls: "ToolCallEmitter", tool: Tool, index: int, number: int) -> None:
        self.number = number
        self.name = tool.name
        self.is_strict = tool.strict
        """Whether a grammar holds the arguments to their schema, so that they have no mistakes."""
        self._calls = calls
        self._schema: Mapping[str, Any] = tool.parameters
        self._index = index
        self._written: list[str] = []
        self._keys: set[str] = set()
        self._repairs: dict[Repaired, None] = {}
        """The repairs of this call in order, each once."""
        self._open = False
        """Whether the string of a streamed parameter is not closed yet."""
        self.lacks_arguments = False
        """Whether required arguments are missing at its end."""
        self._repeats = False
        """Whether a key is written twice. Readers of JSON take the last value."""

    @property
    def arguments(self) -> str:
        """The arguments as JSON text, as far as they are written."""
        return "".join(self._written)

    def lacks(self, key: str) -> bool:
        """Whether a required parameter other than `key` has no value."""
        return not self._keys.issuperset(set(required(self._schema)) - {key})

    def knows(self, tool: str) -> bool:
        return self._calls.knows(tool)

    @property
    def known(self) -> frozenset[str]:
        """The parameters that the tool's schema lists."""
        return frozenset(properties_in(self._schema))

    @property
    def awaited(self) -> frozenset[str]:
        """The required arguments that have no value yet."""
        return self.known - self._keys

    def meant(self, key: str) -> str:
        """Returns the parameter that a key means, which may be written with white space around
        it."""
        if key in self.known or key.strip() not in self.known:
            return key
        self.repaired()
        return key.strip()

    def streams(self, key: str) -> bool:
        """Whether text for this parameter is certain to stay the text it is."""
        return key not in self._keys and takes_text(self._schema, key)

    def add_repair(self, what: RepairKind, part: str = "") -> None:
        """part: the path of what was repaired, within the call."""
        self._repairs[Repaired(self._index, what, f"tool_calls[{self.number}]{part}")] = None

    @property
    def may_be_repaired(self) -> bool:
        return self._calls.allowed.mistakes

    def repaired(self, what: RepairKind = "json") -> None:
        """Reports a mistake in how the arguments are written; Malformed if none may be repaired."""
        if not self._calls.allowed.mistakes:
            raise Malformed("a mistake that may not be repaired")
        self.add_repair(what, "" if what == "format" else ARGUMENTS)

    def value(self, key: str, value: Any) -> None:
        """Writes a parameter that is complete. Of one that is given twice the last value counts."""
        self._put(key, self._fitted(key, value))

    def leave_empty(self, key: str) -> None:
        """Writes a parameter whose value is missing: an empty text, or nothing if it can't be
        text."""
        self.repaired()
        if "string" in types_of_member(self._schema, key):
            self._put(key, "")
        elif key in required(self._schema):
            raise Malformed("a required value is missing")

    def untyped(self, key: str, text: str) -> bool:
        """Writes a value like `value`, from a format that has every value as bare text. Returns
        whether it is text."""
        takes_string = "string" in types_of_member(self._schema, key)
        if not (text.strip() or takes_string or key in required(self._schema)):
            self.leave_empty(key)
            return False
        value = read_as(text, self._schema, key, self.repaired)
        self._put(key, value)
        return isinstance(value, str)

    def untyped_tree(self, key: str, value: Any) -> None:
        """Applies `untyped` to lists and objects in which every value is such a text."""
        self._put(key, read_tree(value, self._schema, key, self.repaired))

    def _put(self, key: str, value: Any) -> None:
        if (inside := self._unwrapped(key, value)) is not None:
            for name, argument in inside.items():
                self._put(name, self._fitted(name, argument))
            return
        if key == value == "":  # the model filled in the format although it had no argument
            self.repaired()
            return
        if key in self._keys:
            self.repaired()
            self._repeats = True
        self._write(self._label(key) + json_of(value))

    def _unwrapped(self, key: str, value: Any) -> Mapping[str, Any] | None:
        inside = unwrapped(key, value, self.known) if self._calls.allowed.mistakes else None
        if inside is not None:
            self.add_repair("format", ARGUMENTS)
        return inside

    def _fitted(self, key: str, value: Any) -> Any:
        (coerced,) = coerce_arguments({key: value}, self._schema, self._calls.allowed).values()
        if json_of(coerced) != json_of(value):
            self.add_repair("type", self._path(key))
        return coerced

    def _path(self, key: str) -> str:
        """Returns the path of an argument; of all arguments if the schema does not name it."""
        return f"{ARGUMENTS}.{key}" if key in self.known else ARGUMENTS

    def text(self, key: str, piece: str) -> None:
        """Writes a piece of a parameter's text; `end_text` follows the last one."""
        if not self._open:
            self._write(self._label(key) + '"')
            self._open = True
        self._write(json_of(piece)[1:-1])

    def end_text(self, key: str) -> None:
        if not self._open:
            self.text(key, "")
        self._write('"')
        self._open = False

    def finish(self) -> None:
        self._write("}" if self._written else "{}")
        self._end()

    def finish_with(self, arguments: Mapping[str, Any]) -> None:
        """Writes all arguments at once; the beginning of them may already be written."""
        if len(arguments) == 1:
            ((key, value),) = arguments.items()
            inside = self._unwrapped(key, value)
            arguments = arguments if inside is None else inside
        whole = json_of({key: self._fitted(key, value) for key, value in arguments.items()})
        if not whole.startswith(self.arguments):
            raise Malformed("the arguments are not those that were begun")
        self._write(whole[len(self.arguments) :])
        self._end()

    def _end(self) -> None:
        arguments = json.loads(self.arguments)
        if self._repeats and self._calls.retract():
            self._written = []
            self._write(json_of(arguments))
        for repair in self._repairs:
            self._calls.emit(repair)
        self.lacks_arguments = not arguments.keys() >= set(required(self._schema))
        for key, wrong in argument_errors(arguments, self._schema):
            path = self._path(key) if key in arguments else f"{ARGUMENTS}.{key}"
            what = f"tool_calls[{self.number}]{path}: {wrong}"
            self._calls.emit(Violation(self._index, what))
        self._calls.emit(ToolCallFinished(self._index, self.number))

    def _label(self, key: str) -> str:
        self._keys.add(key)
        return (", " if self._written else "{") + json_of(key) + ": "

    def _write(self, piece: str) -> None:
        if piece:
            self._written.append(piece)
            self._calls.emit(ToolCallDelta(self._index, self.number, piece))


NAMESPACE = "functions."
"""Models are taught to write a tool's name with it, some more than others."""


class ToolCallEmitter:
    def __init__(
        self,
        index: int,
        tools: Sequence[Tool],
        emit: Callable[[Event], None],
        make_id: Callable[[], str] = new_id,
        allowed: RepairPolicy = ALL_REPAIRS,
        *,
        holds_calls: bool = False,
    ) -> None:
        self.allowed = allowed
        self.misplaced: tuple[RepairKind, ...] = ()
        """The repairs to report for the next calls, because of where or in which format they
        stand."""
        self._index = index
        self._tools = {tool.name: tool for tool in tools}
        self._emit = emit
        self._make_id = make_id
        self.started = 0
        self.attempts = 0
        """The number of calls that were begun, whether they were reported or not."""
        self._ids: set[str] = set()
        self._current: ToolCallWriter | None = None
        """The call that was begun and is neither finished nor given up."""
        self.holds_calls = holds_calls
        """Whether the next call is reported only once it is complete."""
        self.may_echo = False
        """Whether the next call may be an echo: if it equals the one before, it is not a second
        decision."""
        self._held: HeldCall | None = None
        """Holds the events of the current call while it may turn out not to be reported."""
        self._before: ToolCallWriter | None = None
        self.finished = 0

    def knows(self, name: str) -> bool:
        return self.meant(name) is not None

    def check_name(self, name: str) -> None:
        """Raises UnknownTool unless the name means a tool of the request."""
        self._tool(name)

    def tool_and_key(self, text: str) -> tuple[str, str]:
        """Splits a tool's name from the name of one of its parameters that follows it without a
        delimiter; empty if no such pair or several fit."""
        owners = [
            (name, text[len(name) :].strip())
            for name, tool in self._tools.items()
            if text.startswith(name) and text[len(name) :].strip() in properties_in(tool.parameters)
        ]
        return owners[0] if len(owners) == 1 else ("", "")

    def parameters(self, name: str) -> frozenset[str]:
        """Returns the parameters of the tool that a name means."""
        meant = self.meant(name)
        return frozenset(properties_in(self._tools[meant].parameters)) if meant else frozenset()

    def needs_none(self, name: str) -> bool:
        """Whether the tool that a name means can be called without arguments."""
        meant = self.meant(name)
        return meant is not None and not required(self._tools[meant].parameters)

    def nameless(self, text: str) -> FoundCall | None:
        """Returns the call of the one tool that takes these arguments, in JSON; None if none or
        several do."""
        try:
            arguments, _ = read_arguments(text.strip(), repairs=self.allowed.mistakes)
        except Malformed:
            return None
        takers = [
            tool.name
            for tool in self._tools.values()
            if is_made_of(
                coerce_arguments(arguments, tool.parameters, self.allowed), tool.parameters
            )
        ]
        return FoundCall(takers[0], arguments) if len(takers) == 1 else None

    def start(self, name: str, id: str | None = None) -> ToolCallWriter:
        """Begins a call. id: the model's own, if its format has ids. An unknown name is Malformed:
        text."""
        tool = self._tool(name)
        unique = id if id and id not in self._ids else self._make_id()
        self._ids.add(unique)
        self.attempts += 1
        self._held = self._hold(tool.name)
        call = self._current = ToolCallWriter(self, tool, self._index, self.started)
        self.started += 1
        for what in self.misplaced:
            call.add_repair(what)
        if name.removeprefix(NAMESPACE) != tool.name != name:
            call.add_repair("name", ".function.name")
        self.emit(ToolCallStarted(self._index, call.number, unique, tool.name))
        return call

    def whole(self, name: str, arguments: object, id: str | None = None) -> None:
        """Writes a call whose arguments came at once; some models write them as text again."""
        members, mistakes = read_arguments(arguments, repairs=self.allowed.mistakes)
        call = self.start(name, id)
        if mistakes:
            call.add_repair("json", ARGUMENTS)
        call.finish_with(members)

    def _tool(self, name: str) -> Tool:
        meant = self.meant(name)
        if meant is None:
            raise UnknownTool(name)
        return self._tools[meant]

    def meant(self, name: str) -> str | None:
        """Returns the name of the tool that a name means, which may be slightly wrong; None if
        there is none."""
        for exact in (name, name.removeprefix(NAMESPACE)):
            if exact in self._tools:
                return exact
        return match_tool_name(name, self._tools) if self.allowed.mistakes else None

    def _hold(self, name: str) -> HeldCall | None:
        before = self._before
        may_repeat = before is not None and self.may_echo and name == before.name
        if not (may_repeat or self.holds_calls):
            return None
        arguments = before.arguments if before and may_repeat else None
        return HeldCall(self._emit, arguments, to_its_end=self.holds_calls)

    def add_repaired(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], what: Sequence[RepairKind] = ("json",)
    ) -> None:
        """Adds all of the calls that could not be read as they were written, or none. The first may
        have been begun. what: the repairs to report for each."""
        begun = self._current
        tools = [self._tool(name) for name, _ in calls]
        wholes = [
            json_of(coerce_arguments(arguments, tool.parameters, self.allowed))
            for tool, (_, arguments) in zip(tools, calls, strict=True)
        ]
        if not (self.allowed.mistakes and calls):
            raise Malformed("nothing that may be repaired")
        if begun and not (tools[0].name == begun.name and wholes[0].startswith(begun.arguments)):
            raise Malformed("not the calls that were begun")
        for name, arguments in calls:
            call, begun = begun or self.start(name), None
            for kind in what:
                call.add_repair(kind, ARGUMENTS)
            call.finish_with(arguments)

    def take_back(self, started: int, finished: int) -> None:
        """Forgets the last calls, which were not reported. started, finished: the counts before
        them."""
        self.started, self.finished = started, finished
        self._before = None

    @property
    def lacks_arguments(self) -> bool:
        """Whether required arguments of the last call are missing."""
        return self._before is not None and self._before.lacks_arguments

    def retract(self) -> bool:
        """Takes back the current call's arguments, unless some of them have been reported. Returns
        whether that was done."""
        return self._held is not None and self._held.retract()

    @property
    def begun(self) -> bool:
        """Whether there is a call that was neither finished nor given up."""
        return self._current is not None

    def give_up(self, *, broken: bool = False) -> None:
        """Takes back the call that was begun, since it is none. broken: whether it becomes text
        although it was reported."""
        call, self._current = self._current, None
        if call and not self._release() and broken:
            what = f"the arguments of {call.name} are malformed, so the call is text"
            self._emit(Violation(self._index, f"tool_calls[{call.number}]: {what}"))

    def emit(self, event: Event) -> None:
        emit = self._held.emit if self._held else self._emit
        if isinstance(event, ToolCallFinished):
            self.finished += 1
            self._before, self._current = self._current, None
            emit(event)
            if self._release():
                self._emit(Repaired(self._index, "stutter", f"tool_calls[{self.started - 1}]"))
        else:
            emit(event)

    def _release(self) -> bool:
        """Stops holding events. Returns whether nothing was reported of the call."""
        held, self._held = self._held, None
        is_silent = held is not None and held.is_silent
        self.started -= is_silent
        return is_silent
