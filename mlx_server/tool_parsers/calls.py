"""Turns what a call format reads into the events of an answer's calls.

A call format reports what it finds: a call begins, a parameter has this value, this is a piece of
its text. The events have the arguments' JSON text in pieces, as early as it is certain. Repairs of
a call are reported when it ends, and so is every violation of its tool's schema, since no grammar
may have constrained it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_server.events import (
    Event,
    Repaired,
    RepairKind,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
)
from mlx_server.messages import Tool
from mlx_server.repair.allowed import ALL_REPAIRS, RepairPolicy
from mlx_server.repair.model_json import Malformed, UnknownTool, loads_arguments, loads_exactly
from mlx_server.repair.names import match_tool_name
from mlx_server.schemas.fitting import is_made_of
from mlx_server.schemas.lenient import properties_in, required
from mlx_server.tool_parsers.arguments import coerce_arguments, json_of
from mlx_server.tool_parsers.call_ids import new_id
from mlx_server.tool_parsers.call_writer import ARGUMENTS, ToolCallWriter
from mlx_server.tool_parsers.held_calls import CompleteCall, HeldCall, RepeatedCall

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
        self._in_a_row = 0
        """The number of identical calls in a row before this one."""
        self.finished = 0

    def knows(self, name: str) -> bool:
        return self.meant(name) is not None

    def check_name(self, name: str) -> None:
        """Raises UnknownTool unless the name means a tool of the request."""
        self._tool(name)

    def tool_and_key(self, text: str) -> tuple[str, str]:
        """Splits a tool's name from the name of one of its parameters that follows it without a
        delimiter; empty if no such pair or several fit."""
        found = [
            (name, text[len(name) :].strip())
            for name, tool in self._tools.items()
            if text.startswith(name) and text[len(name) :].strip() in properties_in(tool.parameters)
        ]
        return found[0] if len(found) == 1 else ("", "")

    def parameters(self, name: str) -> frozenset[str]:
        """Returns the parameters of the tool that a name means."""
        meant = self.meant(name)
        return frozenset(properties_in(self._tools[meant].parameters)) if meant else frozenset()

    def needs_none(self, name: str) -> bool:
        """Whether the tool that a name means can be called without arguments."""
        meant = self.meant(name)
        return meant is not None and not required(self._tools[meant].parameters)

    def tool_made_of(self, text: str) -> str:
        """Returns the one tool that takes these arguments, in JSON; empty if none or several do."""
        if not self.allowed.names:
            return ""
        try:
            arguments = loads_exactly(text)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(arguments, Mapping):
            return ""
        tools = self._tools.items()
        found = [name for name, tool in tools if is_made_of(arguments, tool.parameters)]
        return found[0] if len(found) == 1 else ""

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
        found, mistakes = self._as_object(arguments)
        call = self.start(name, id)
        if mistakes:
            call.add_repair("json", ARGUMENTS)
        call.finish_with(found)

    def _as_object(self, arguments: object) -> tuple[Mapping[str, Any], bool]:
        """Returns the arguments as an object, and whether they had to be repaired."""
        found, mistakes = arguments, arguments is None
        if arguments is None and self.allowed.json:
            found = {}
        if isinstance(arguments, str):
            try:
                found = loads_exactly(arguments)
            except (ValueError, RecursionError):
                mistakes = True
                if not self.allowed.json:
                    raise Malformed("no JSON") from None
                found = loads_arguments(arguments)
        if not isinstance(found, Mapping):
            raise Malformed("arguments should be an object")
        return found, mistakes

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
        return match_tool_name(name, self._tools) if self.allowed.names else None

    def _hold(self, name: str) -> HeldCall | None:
        before, most = self._before, self.allowed.repeats
        complete = CompleteCall(self._emit) if self.holds_calls else None
        is_suspect = self.may_echo or (most is not None and self._in_a_row >= most)
        if before and is_suspect and name == before.name:
            return RepeatedCall(before.arguments, self._emit, complete)
        return complete

    def add_repaired(
        self, found: Sequence[tuple[str, Mapping[str, Any]]], what: Sequence[RepairKind] = ("json",)
    ) -> None:
        """Adds all of the calls that could not be read as they were written, or none. The first may
        have been begun. what: the repairs to report for each."""
        begun = self._current
        tools = [self._tool(name) for name, _ in found]
        wholes = [
            json_of(coerce_arguments(arguments, tool.parameters, self.allowed))
            for tool, (_, arguments) in zip(tools, found, strict=True)
        ]
        if not (self.allowed.json and found):
            raise Malformed("nothing that may be repaired")
        if begun and not (tools[0].name == begun.name and wholes[0].startswith(begun.arguments)):
            raise Malformed("not the calls that were begun")
        for name, arguments in found:
            call, begun = begun or self.start(name), None
            for kind in what:
                call.add_repair(kind, ARGUMENTS)
            call.finish_with(arguments)

    def take_back(self, started: int, finished: int) -> None:
        """Forgets the last calls, which were not reported. started, finished: the counts before
        them."""
        self.started, self.finished = started, finished
        self._before, self._in_a_row = None, 0

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
            self._count_in_a_row()
            emit(event)
            if self._release():
                self._emit(Repaired(self._index, "stutter", f"tool_calls[{self.started - 1}]"))
        else:
            emit(event)

    def _count_in_a_row(self) -> None:
        before, call = self._before, self._current
        is_same = before and call and before.same_as(call)
        self._in_a_row = self._in_a_row + 1 if is_same else 1
        self._before, self._current = call, None

    def _release(self) -> bool:
        """Stops holding events. Returns whether nothing was reported of the call."""
        held, self._held = self._held, None
        is_silent = held is not None and held.is_silent
        self.started -= is_silent
        return is_silent
