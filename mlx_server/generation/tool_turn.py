"""One turn of a model with MCP tools: it collects the output and selects the events to report."""

import re
import uuid
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mlx_server.events import (
    Answer,
    ApprovalRequested,
    BuiltInCall,
    CallSoFar,
    Event,
    McpCallDelta,
    McpCallReady,
    McpCallStarted,
    PromptProgress,
    PromptScored,
    ReasoningDelta,
    Repaired,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
)
from mlx_server.messages import Message, Tool

CALL_PLACE = re.compile(r"(?<=^tool_calls\[)\d+(?=\])")
"""Matches the number of the call in a path such as `tool_calls[0].arguments`."""


@dataclass(frozen=True, slots=True)
class ServerTool:
    server: str
    name: str
    """The tool's name on that server."""
    tool: Tool
    """The tool as the model sees it."""
    needs_approval: bool


@dataclass(slots=True, kw_only=True)
class TurnCall(CallSoFar):
    """A call by the name that the model sees."""

    number: int
    offered: ServerTool | None
    """The MCP tool; None for a function tool, which the client runs."""
    is_ignored: bool = False

    @property
    def is_run(self) -> bool:
        return bool(
            self.offered
            and self.is_finished
            and not (self.is_ignored or self.offered.needs_approval)
        )


@dataclass
class ToolTurn:
    offered: dict[str, ServerTool]
    first_call: int
    may_run: int
    """The most calls that may be run in this turn; further ones are ignored."""
    answer: Answer = field(default_factory=Answer)
    calls: dict[int, TurnCall] = field(default_factory=dict)

    def visible_events(self, event: Event) -> Iterator[Event]:
        self.answer.add(event)
        match event:
            case TextDelta() | ReasoningDelta() | BuiltInCall() | PromptProgress() | PromptScored():
                yield event
            case ToolCallStarted(call=at):
                self.answer.begun_calls[at] = self.calls[at] = call = self._begun(event)
                yield from _call_started(event, call)
            case ToolCallDelta(call=at):
                yield from _call_delta(event, self.calls[at])
            case ToolCallFinished(call=at):
                yield from _call_finished(event, self.calls[at])
            case Repaired(where=where):
                yield replace(event, where=self._renumbered(where))
            case Violation(what=what):
                yield replace(event, what=self._renumbered(what))

    def _renumbered(self, path: str) -> str:
        """The path with the call's number among the calls of all rounds."""
        return CALL_PLACE.sub(lambda found: str(int(found[0]) + self.first_call), path)

    def _begun(self, event: ToolCallStarted) -> TurnCall:
        offered = self.offered.get(event.name)
        running = sum(other.offered is not None for other in self.calls.values())
        return TurnCall(
            *(event.id, event.name, event.extra_content),
            number=self.first_call + event.call,
            offered=offered,
            is_ignored=offered is not None and running >= self.may_run,
        )

    def runs(self) -> list[TurnCall]:
        return [call for call in self.calls.values() if call.is_run]

    def message(self) -> Message:
        """The turn as a message of the next round's prompt, with the calls that the server runs."""
        calls = tuple(call.as_tool_call() for call in self.runs())
        return replace(self.answer.message(), tool_calls=calls)

    @property
    def awaits_client(self) -> bool:
        """Whether the client has calls to make or to approve."""
        return any(
            call.is_finished and not call.is_ignored and not call.is_run
            for call in self.calls.values()
        )

    @property
    def has_functions(self) -> bool:
        return any(call.is_finished and call.offered is None for call in self.calls.values())


def _call_started(event: ToolCallStarted, call: TurnCall) -> Iterator[Event]:
    if call.offered is None:
        yield replace(event, call=call.number)
    elif not call.is_ignored and not call.offered.needs_approval:
        server, name = call.offered.server, call.offered.name
        yield McpCallStarted(
            event.index, call.number, call.id, server, name, extra_content=call.extra_content
        )


def _call_delta(event: ToolCallDelta, call: TurnCall) -> Iterator[Event]:
    if call.offered is None:
        yield replace(event, call=call.number)
    elif not call.is_ignored and not call.offered.needs_approval:
        yield McpCallDelta(event.index, call.number, event.arguments)


def _call_finished(event: ToolCallFinished, call: TurnCall) -> Iterator[Event]:
    if call.offered is None:
        yield replace(event, call=call.number)
    elif call.is_ignored:
        return
    elif call.offered.needs_approval:
        yield ApprovalRequested(
            event.index,
            call.number,
            f"mcpr_{uuid.uuid4().hex}",
            call.offered.server,
            call.offered.name,
            "".join(call.arguments),
            call.extra_content,
        )
    else:
        yield McpCallReady(event.index, call.number)


class ToolNames:
    """The names by which the model sees MCP tools: the server's own name where it is unique, else
    one with the server's label."""

    def __init__(self, functions: Sequence[Tool]) -> None:
        self._taken = {tool.name for tool in functions}
        self._known: dict[tuple[str, str], str] = {}

    def of(self, server: str, name: str, is_unique: bool) -> str:
        plain, long = callable_name(name), callable_name(name, server)
        shown = plain if is_unique and plain not in self._taken else unused_name(long, self._taken)
        self._taken.add(shown)
        self._known[server, name] = shown
        return shown

    def known(self, server: str | None, name: str) -> str:
        return self._known.get((server or "", name), callable_name(name))


def callable_name(name: str, namespace: str = "") -> str:
    """The name, after the namespace if there is one, in at most 64 characters that every family's
    call format allows."""
    joined = f"{namespace.removesuffix('__')}__{name}" if namespace else name
    return re.sub(r"[^A-Za-z0-9_-]", "_", joined)[:64]


def unused_name(preferred: str, taken: Container[str]) -> str:
    shown, again = preferred, 1
    while shown in taken:
        again += 1
        shown = f"{preferred[:60]}_{again}"
    return shown
