"""The agentic loop of MCP tools: the model calls tools, the server runs them, and the model
continues with the results. Each round is a run of `generate`; all rounds make one answer.

The rounds end with a turn that has nothing to run: an answer, or calls that the client must make or
approve. When the limit of calls, rounds or seconds is reached, further calls are ignored, and in a
last round without tools the model answers from the results that it has.
"""

import asyncio
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Container, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from mlx_server import limits
from mlx_server.errors import BadRequest, CompilerTooSlow, ContextTooLong, InvalidGrammar
from mlx_server.events import (
    Answer,
    ApprovalRequested,
    BuiltInCall,
    CallSoFar,
    Event,
    Finished,
    FinishReason,
    McpCallDelta,
    McpCallFinished,
    McpCallReady,
    McpCallStarted,
    PromptProgress,
    ReasoningDelta,
    Repaired,
    Started,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    ToolsListed,
    Violation,
    renumbered,
    total,
)
from mlx_server.generation.generate import generate
from mlx_server.grammars.arguments import object_of
from mlx_server.grammars.formats import check_schema
from mlx_server.mcp import Connectors, McpError, Toolset
from mlx_server.messages import (
    ContentPart,
    Conversation,
    Message,
    Tool,
    ToolCall,
    content_of,
)
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread
from mlx_server.requests import (
    Approval,
    GenerateRequest,
    McpChoice,
    McpTools,
    NamedTool,
    ToolChoice,
)

log = logging.getLogger("mlx_server.mcp")


def respond(
    request: GenerateRequest, tools: McpTools, connectors: Connectors, pool: Pool
) -> AsyncGenerator[Event]:
    """Yield the events, as `generate` does, with the tools of MCP servers in addition to those of
    the conversation.

    Errors in the request are raised before `Started`. The servers list their tools and run the
    approved calls before it too; both are reported right after it.
    """
    if not tools.servers and not tools.approvals:
        return generate(request, pool)
    return _respond(request, tools, connectors, pool)


async def _respond(
    request: GenerateRequest, tools: McpTools, connectors: Connectors, pool: Pool
) -> AsyncGenerator[Event]:
    if len(tools.approvals) > limits.MCP_CALLS:
        raise BadRequest(
            f"`input` has {len(tools.approvals)} pending approvals; one response runs at most "
            f"{limits.MCP_CALLS} of them. Send fewer.",
            param="input",
        )
    assert len(request.prompts) == request.n == 1, "a loop has one answer"
    async with connectors.open(tools.servers) as toolset:
        # in a thread, since checking the schemas of the servers' tools may take long
        rounds = await in_thread(_Rounds, request, tools, toolset, pool)
        async with aclosing(rounds.events()) as events:
            async for event in events:
                yield event


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
            case TextDelta() | ReasoningDelta() | BuiltInCall() | PromptProgress():
                yield event
            case ToolCallStarted(call=at):
                self.answer.begun_calls[at] = self.calls[at] = self._begun(event)
                yield from _call_events(event, self.calls[at])
            case ToolCallDelta(call=at) | ToolCallFinished(call=at):
                yield from _call_events(event, self.calls[at])
            case Repaired(where=where):
                yield replace(event, where=self._renumbered(where))
            case Violation(what=what):
                yield replace(event, what=self._renumbered(what))

    def _renumbered(self, path: str) -> str:
        """The path with the call's number among the calls of all rounds."""
        return renumbered(path, lambda number: number + self.first_call)

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


def _call_events(
    event: ToolCallStarted | ToolCallDelta | ToolCallFinished, call: TurnCall
) -> Iterator[Event]:
    """What is reported of a call's event. A call that needs approval is reported at its end."""
    if (offered := call.offered) is None:
        yield replace(event, call=call.number)
    elif call.is_ignored:
        return
    elif offered.needs_approval:
        if isinstance(event, ToolCallFinished):
            yield ApprovalRequested(
                event.index,
                call.number,
                f"mcpr_{uuid.uuid4().hex}",
                offered.server,
                offered.name,
                "".join(call.arguments),
                call.extra_content,
            )
    else:
        match event:
            case ToolCallStarted(index):
                yield McpCallStarted(
                    *(index, call.number, call.id, offered.server, offered.name),
                    extra_content=call.extra_content,
                )
            case ToolCallDelta(index, _, arguments):
                yield McpCallDelta(index, call.number, arguments)
            case ToolCallFinished(index):
                yield McpCallReady(index, call.number)


class _Rounds:
    def __init__(
        self, request: GenerateRequest, tools: McpTools, toolset: Toolset, pool: Pool
    ) -> None:
        conversation = request.prompts[0]
        assert isinstance(conversation, Conversation)
        self._request = request
        self._toolset = toolset
        self._pool = pool
        self._mcp = tools
        self._tools = ServerTools(toolset, conversation.tools)
        self._conversation = replace(
            conversation,
            messages=tuple(map(self._tools.renamed, conversation.messages)),
            tools=(*conversation.tools, *(each.tool for each in self._tools.by_name.values())),
        )
        self._ends = time.monotonic() + limits.MCP_ROUND_SECONDS
        self._calls = self._runs = self._rounds = 0
        self._finished: list[Finished] = []
        self._started: list[Started] = []
        self._ended = False

    async def events(self) -> AsyncGenerator[Event]:
        choice = self._first_choice()
        before: list[Event] = [*self._tools.listed()]
        before += [event async for event in self._approved()]
        while True:
            turn = ToolTurn(self._tools.by_name, self._calls, self._calls_left())
            async with aclosing(self._round(turn, choice)) as events:
                async for event in events:
                    yield event
                    if isinstance(event, Started):
                        for each in before:
                            yield each
            self._calls += len(turn.calls)
            if runs := turn.runs():
                self._rounds += 1
                self._conversation = self._conversation.with_answer(turn.message())
                async with aclosing(self._run(runs)) as results:
                    async for event in results:
                        yield event
            assert turn.answer.finished
            is_cut = turn.answer.finished.reason == "length" or bool(
                runs and self._tokens_left() == 0
            )
            if not runs or is_cut or turn.awaits_client:
                yield self._end(turn, "length" if is_cut else None)
                return
            is_late = time.monotonic() > self._ends or self._rounds >= limits.MCP_ROUNDS
            may_call = self._calls_left() and not is_late and self._request.tool_choice != "none"
            choice = "auto" if may_call else "none"

    async def _round(self, turn: ToolTurn, choice: ToolChoice) -> AsyncGenerator[Event]:
        """The events of a round. If the results of calls don't fit the context, a notice takes
        their place."""
        may_shorten = self._runs > 0
        while True:
            request = replace(
                self._request,
                prompts=(self._conversation,),
                tool_choice=choice,
                max_tokens=self._tokens_left(),
            )
            try:
                async with aclosing(generate(request, self._pool)) as events:
                    async for event in events:
                        for visible in self._noted(event, turn):
                            yield visible
                return
            except ContextTooLong:
                if not may_shorten:
                    raise
                may_shorten = False
                self._conversation = _without_last_results(self._conversation)

    def _noted(self, event: Event, turn: ToolTurn) -> Iterator[Event]:
        """What is reported of the event."""
        if isinstance(event, Started):
            self._started.append(event)
            if len(self._started) == 1:
                yield replace(event, unfinished=self._unfinished)
            return
        if isinstance(event, Finished):
            self._finished.append(event)
        yield from turn.visible_events(event)

    def _unfinished(self) -> TokenCounts:
        """The tokens so far of all rounds, which have one usage."""
        if self._ended:
            return TokenCounts()
        return total(
            [
                *(each.counts for each in self._finished),
                self._started[-1].unfinished(),
                self._further(),
            ]
        )

    def _further(self) -> TokenCounts:
        rounds = self._started[1:]
        return TokenCounts(
            further_prompt_tokens=sum(each.prompt_tokens for each in rounds),
            further_tool_output_tokens=sum(each.tool_output_tokens for each in rounds),
        )

    def _first_choice(self) -> ToolChoice:
        if self._mcp.choice is None:
            return self._request.tool_choice if self._calls_left() else "none"
        return self._tools.choice(self._mcp.choice)

    async def _approved(self) -> AsyncIterator[Event]:
        """Run the approved calls and append all decided calls to the conversation."""
        if not self._mcp.approvals:
            return
        calls = [self._decided(approval) for approval in self._mcp.approvals]
        self._conversation = _with_calls(
            self._conversation, [call.as_tool_call() for call in calls]
        )
        granted = []
        for call, approval in zip(calls, self._mcp.approvals, strict=True):
            if not approval.approve:
                reason = f": {approval.reason}" if approval.reason else "."
                self._add_result(call, f"The user has denied this call{reason}")
                continue
            granted.append(call)
            yield McpCallStarted(
                *(0, call.number, call.id, approval.server, approval.name, approval.id),
                extra_content=call.extra_content,
            )
            yield McpCallDelta(0, call.number, approval.arguments)
            yield McpCallReady(0, call.number)
        async for event in self._run(granted):
            yield event

    def _decided(self, approval: Approval) -> TurnCall:
        shown = self._tools.known_name(approval.server, approval.name)
        tool = Tool(shown)
        offered = ServerTool(approval.server, approval.name, tool, needs_approval=False)
        id, extra = f"call_{uuid.uuid4().hex}", approval.extra_content
        call = TurnCall(
            *(id, shown, extra, [approval.arguments]), number=self._calls, offered=offered
        )
        self._calls += 1
        return call

    async def _run(self, calls: Sequence[TurnCall]) -> AsyncGenerator[Event]:
        """Run the calls concurrently, report each result as it comes, and add all results to the
        conversation in the order of the calls."""
        self._runs += len(calls)
        running = {asyncio.create_task(self._result(call)): call for call in calls}
        results: dict[int, tuple[str, Sequence[ContentPart]]] = {}
        try:
            waiting = set(running)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
                for task in done:
                    call, (output, error, parts) = running[task], task.result()
                    results[call.number] = error or output or "", parts
                    yield McpCallFinished(0, call.number, output, error)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        for call in calls:
            self._add_result(call, *results[call.number])

    async def _result(self, call: TurnCall) -> tuple[str | None, str | None, Sequence[ContentPart]]:
        """The output, the error, and the output's parts if there are pictures among them."""
        assert call.offered
        arguments = "".join(call.arguments)
        try:
            result = await self._toolset.call(call.offered.server, call.offered.name, arguments)
            return result.text, None, result.parts
        except McpError as error:  # the log has no message, which may quote the server or client
            log.warning("a call of an MCP tool failed (%s)", error.kind)
            return None, str(error), ()

    def _add_result(self, call: TurnCall, text: str, parts: Sequence[ContentPart] = ()) -> None:
        text = content_of(parts) if parts else text
        result = Message("tool", text, name=call.name, tool_call_id=call.id, parts=tuple(parts))
        self._conversation = replace(
            self._conversation, messages=(*self._conversation.messages, result)
        )

    def _calls_left(self) -> int:
        most, requested = limits.MCP_CALLS, self._mcp.max_calls
        return max(0, min(most, most if requested is None else requested) - self._runs)

    def _tokens_left(self) -> int | None:
        """The rest of `max_tokens`, which all rounds share; None if there is no limit."""
        most = self._request.max_tokens
        used = sum(finished.counts.completion_tokens for finished in self._finished)
        return None if most is None else max(0, most - used)

    def _end(self, turn: ToolTurn, reason: FinishReason | None) -> Finished:
        self._ended = True
        rounds = self._finished
        counts = total([*(each.counts for each in rounds), self._further()])
        ended: FinishReason = "tool_calls" if turn.has_functions else "stop"
        return Finished(
            0,
            reason or ended,
            counts,
            answer_forced=any(each.answer_forced for each in rounds),
            raw=tuple(text for each in rounds for text in each.raw),
        )


def _with_calls(conversation: Conversation, calls: Sequence[ToolCall]) -> Conversation:
    """The conversation with the calls in its last message, or in a new one if that is not the
    assistant's or has calls already."""
    *before, last = conversation.messages
    if last.role != "assistant" or last.tool_calls:
        message = Message("assistant", tool_calls=tuple(calls))
        return replace(conversation, messages=(*conversation.messages, message))
    return replace(conversation, messages=(*before, replace(last, tool_calls=tuple(calls))))


def _without_last_results(conversation: Conversation) -> Conversation:
    messages = list(conversation.messages)
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].role != "tool":
            break
        size = len(messages[at].content)
        notice = f"[The result has {size} characters, which do not fit the context.]"
        messages[at] = replace(messages[at], content=notice[: max(size, 1)], parts=())
    return replace(conversation, messages=tuple(messages))


class ServerTools:
    def __init__(self, toolset: Toolset, functions: Sequence[Tool]) -> None:
        """functions: the conversation's own tools, whose names no other tool may get."""
        self._toolset = toolset
        self._left_out: dict[str, list[str]] = {}
        """Error messages for the tools that are left out, by the server's label."""
        self.by_name = self._usable({tool.name for tool in functions})
        self._names = {(each.server, each.name): name for name, each in self.by_name.items()}

    def known_name(self, server: str, name: str) -> str:
        """The name by which the model sees a tool, which may be offered no more."""
        return self._names.get((server, name), callable_name(name))

    def listed(self) -> Iterator[Event]:
        for server in self._toolset.servers:
            left_out = self._left_out.get(server.requested.label, [])
            errors = [*([server.listing.error] if server.listing.error else []), *left_out]
            if server.requested.listed and not errors:
                continue
            offered = {each.name for each in self.by_name.values()}
            tools = (tool for name, tool in server.listing.tools.items() if name in offered)
            yield ToolsListed(0, server.requested.label, tuple(tools), " ".join(errors) or None)

    def choice(self, choice: McpChoice) -> ToolChoice:
        """A choice among one server's tools, in the names that the model sees. Raises BadRequest
        for a tool that the server does not offer."""
        if choice.name is None and any(o.server == choice.server for o in self.by_name.values()):
            return "required"
        for shown, offered in self.by_name.items():
            if (offered.server, offered.name) == (choice.server, choice.name):
                return NamedTool(shown)
        raise BadRequest(
            f"`tool_choice` requires {choice.name or 'a tool'!r:.64} of the MCP server "
            f"{choice.server!r:.64}, which does not offer it.",
            param="tool_choice",
        )

    def _usable(self, taken: set[str]) -> dict[str, ServerTool]:
        """The tools by the names that the model sees: the server's own where it is unique, else one
        with the server's label."""
        usable: dict[str, ServerTool] = {}
        listed_names = Counter(n for each in self._toolset.servers for n in each.listing.tools)
        for server in self._toolset.servers:
            label = server.requested.label
            for name, listed in server.listing.tools.items():
                try:
                    check_schema(object_of(listed.schema), strict=False)
                except (InvalidGrammar, CompilerTooSlow) as error:
                    sentence = f"{name!r} is left out: {error.message}"
                    self._left_out.setdefault(label, []).append(sentence)
                    continue
                shown = callable_name(name)
                if listed_names[name] > 1 or shown in taken:
                    shown = unused_name(callable_name(name, label), taken)
                taken.add(shown)
                tool = Tool(shown, listed.description, listed.schema)
                usable[shown] = ServerTool(label, name, tool, server.needs_approval(name))
        return usable

    def renamed(self, message: Message) -> Message:
        """The message with the current names of the tools in its earlier calls."""
        if not any(call.server for call in message.tool_calls):
            return message
        calls = (
            replace(call, name=self.known_name(call.server, call.name), server=None)
            if call.server
            else call
            for call in message.tool_calls
        )
        return replace(message, tool_calls=tuple(calls))


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
