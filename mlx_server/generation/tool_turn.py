"""One turn of a model with MCP tools: it collects the output and selects the events to report."""

import re
import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_server.events import (
    ApprovalRequested,
    BuiltInCall,
    Event,
    Finished,
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
from mlx_server.messages import Message, Tool, ToolCall

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


@dataclass
class TurnCall:
    number: int
    id: str
    name: str
    """The tool's name as the model sees it."""
    offered: ServerTool | None
    """The MCP tool; None for a function tool, which the client runs."""
    extra_content: Mapping[str, Any] | None = None
    arguments: list[str] = field(default_factory=list)
    is_made: bool = False
    is_ignored: bool = False

    @property
    def is_run(self) -> bool:
        return bool(
            self.offered and self.is_made and not (self.is_ignored or self.offered.needs_approval)
        )

    def as_tool_call(self) -> ToolCall:
        arguments = "".join(self.arguments)
        return ToolCall(self.id, self.name, arguments, extra_content=self.extra_content)


@dataclass
class ToolTurn:
    offered: dict[str, ServerTool]
    first_call: int
    may_run: int
    """The most calls that may be run in this turn; further ones are ignored."""
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, TurnCall] = field(default_factory=dict)
    finished: Finished | None = None

    def visible_events(self, event: Event) -> Iterator[Event]:
        match event:
            case TextDelta():
                self.texts.append(event.separated)
                yield event
            case ReasoningDelta():
                self.reasoning.append(event.separated)
                yield event
            case BuiltInCall() | PromptProgress() | PromptScored():
                yield event
            case ToolCallStarted(call=at):
                call = self.calls[at] = self._begun(event)
                yield from _call_started(event, call)
            case ToolCallDelta(call=at):
                self.calls[at].arguments.append(event.arguments)
                yield from _call_delta(event, self.calls[at])
            case ToolCallFinished(call=at):
                self.calls[at].is_made = True
                yield from _call_finished(event, self.calls[at])
            case Repaired(where=where):
                yield replace(event, where=self._renumbered(where))
            case Violation(what=what):
                yield replace(event, what=self._renumbered(what))
            case Finished():
                self.finished = event

    def _renumbered(self, path: str) -> str:
        """The path with the call's number among the calls of all rounds."""
        return CALL_PLACE.sub(lambda found: str(int(found[0]) + self.first_call), path)

    def _begun(self, event: ToolCallStarted) -> TurnCall:
        offered = self.offered.get(event.name)
        number = self.first_call + event.call
        call = TurnCall(number, event.id, event.name, offered, event.extra_content)
        running = sum(other.offered is not None for other in self.calls.values())
        call.is_ignored = offered is not None and running >= self.may_run
        return call

    def runs(self) -> list[TurnCall]:
        return [call for call in self.calls.values() if call.is_run]

    def message(self) -> Message:
        """The turn as a message of the next round's prompt, with the calls that the server runs."""
        return Message(
            "assistant",
            "".join(self.texts),
            reasoning="".join(self.reasoning) or None,
            tool_calls=tuple(call.as_tool_call() for call in self.runs()),
        )

    @property
    def awaits_client(self) -> bool:
        """Whether the client has calls to make or to approve."""
        return any(
            call.is_made and not call.is_ignored and not call.is_run for call in self.calls.values()
        )

    @property
    def has_functions(self) -> bool:
        return any(call.is_made and call.offered is None for call in self.calls.values())


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
