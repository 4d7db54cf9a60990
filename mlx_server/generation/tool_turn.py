"""One turn of a model that was offered tools of MCP servers: what it said, and who hears of it."""

import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mlx_server.events import (
    ApprovalRequested,
    BuiltInCall,
    Event,
    Finished,
    McpCallDelta,
    McpCallReady,
    McpCallStarted,
    PromptProgress,
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
"""Of the call in a `Repaired.where`."""


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server, as the model sees it."""

    server: str
    name: str
    """As the server calls it."""
    tool: Tool
    needs_approval: bool


@dataclass
class TurnCall:
    number: int
    id: str
    name: str
    """As the model sees it."""
    offered: ServerTool | None
    """None: a function tool of the client's."""
    arguments: list[str] = field(default_factory=list)
    is_made: bool = False
    is_ignored: bool = False

    @property
    def is_run(self) -> bool:
        return bool(
            self.offered and self.is_made and not (self.is_ignored or self.offered.needs_approval)
        )

    def as_tool_call(self) -> ToolCall:
        return ToolCall(self.id, self.name, "".join(self.arguments))


@dataclass
class ToolTurn:
    """What the model said in one round, and who of the events' readers hears of it."""

    offered: dict[str, ServerTool]
    first_call: int
    may_run: int
    """Of its calls; others are ignored."""
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, TurnCall] = field(default_factory=dict)
    finished: Finished | None = None

    def visible_events(self, event: Event) -> Iterator[Event]:
        match event:
            case TextDelta(text=text):
                self.texts.append(text)
                yield event
            case ReasoningDelta(text=text):
                self.reasoning.append(text)
                yield event
            case BuiltInCall() | PromptProgress() | Violation():
                yield event
            case ToolCallStarted(call=at):
                call = self.calls[at] = self._begun(event)
                yield from _started(event, call)
            case ToolCallDelta(call=at):
                self.calls[at].arguments.append(event.arguments)
                yield from _went_on(event, self.calls[at])
            case ToolCallFinished(call=at):
                self.calls[at].is_made = True
                yield from _made(event, self.calls[at])
            case Repaired(where=where):
                shift = self.first_call
                where = CALL_PLACE.sub(lambda found: str(int(found[0]) + shift), where)
                yield replace(event, where=where)
            case Finished():
                self.finished = event

    def _begun(self, event: ToolCallStarted) -> TurnCall:
        offered = self.offered.get(event.name)
        call = TurnCall(self.first_call + event.call, event.id, event.name, offered)
        running = sum(other.offered is not None for other in self.calls.values())
        call.is_ignored = offered is not None and running >= self.may_run
        return call

    def runs(self) -> list[TurnCall]:
        return [call for call in self.calls.values() if call.is_run]

    def message(self) -> Message:
        """As it goes back to the model."""
        return Message(
            "assistant",
            "".join(self.texts),
            reasoning="".join(self.reasoning) or None,
            tool_calls=tuple(call.as_tool_call() for call in self.runs()),
        )

    @property
    def is_the_clients(self) -> bool:
        """Whether there are calls to be made, or approved, by somebody else."""
        return any(
            call.is_made and not call.is_ignored and not call.is_run for call in self.calls.values()
        )

    @property
    def has_functions(self) -> bool:
        return any(call.is_made and call.offered is None for call in self.calls.values())


def _started(event: ToolCallStarted, call: TurnCall) -> Iterator[Event]:
    if call.offered is None:
        yield replace(event, call=call.number)
    elif not call.is_ignored and not call.offered.needs_approval:
        server, name = call.offered.server, call.offered.name
        yield McpCallStarted(event.index, call.number, call.id, server, name)


def _went_on(event: ToolCallDelta, call: TurnCall) -> Iterator[Event]:
    if call.offered is None:
        yield replace(event, call=call.number)
    elif not call.is_ignored and not call.offered.needs_approval:
        yield McpCallDelta(event.index, call.number, event.arguments)


def _made(event: ToolCallFinished, call: TurnCall) -> Iterator[Event]:
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
        )
    else:
        yield McpCallReady(event.index, call.number)


class ToolNames:
    """What the model calls the tools of servers: as the server does, where that is one name."""

    def __init__(self, functions: Sequence[Tool]) -> None:
        self._taken = {tool.name for tool in functions}
        self._known: dict[tuple[str, str], str] = {}

    def of(self, server: str, name: str, is_unique: bool) -> str:
        plain, long = _word(name), _word(f"{server}__{name}")
        wanted = plain if is_unique and plain not in self._taken else long
        shown, again = wanted, 1
        while shown in self._taken:
            again += 1
            shown = f"{wanted[:60]}_{again}"
        self._taken.add(shown)
        self._known[server, name] = shown
        return shown

    def known(self, server: str | None, name: str) -> str:
        return self._known.get((server or "", name), _word(name))


def _word(name: str) -> str:
    """Letters that every family's notation has for names."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
