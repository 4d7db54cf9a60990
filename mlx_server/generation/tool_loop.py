"""The agentic loop of MCP tools: the model calls tools, the server runs them, and the model
continues with the results. Each round is a run of `generate`; all rounds make one answer.

The rounds end with a turn that has nothing to run: an answer, or calls that the client must make or
approve. When the limit of calls, rounds or seconds is reached, further calls are ignored, and in a
last round without tools the model answers from the results that it has.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlx_server import limits
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.events import (
    Event,
    Finished,
    FinishReason,
    McpCallDelta,
    McpCallFinished,
    McpCallReady,
    McpCallStarted,
    Started,
    TokenCounts,
    total,
)
from mlx_server.generation.generate import generate
from mlx_server.generation.server_tools import ServerTools
from mlx_server.generation.tool_turn import ServerTool, ToolTurn, TurnCall
from mlx_server.mcp import Connectors, McpError, Toolset
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread
from mlx_server.requests import Approval, GenerateRequest, McpTools, ToolChoice

log = logging.getLogger("mlx_server.mcp")


@dataclass(frozen=True, slots=True)
class ToolLoopLimits:
    rounds: int = limits.MCP_ROUNDS
    """The most rounds in which calls are run."""
    seconds: float = limits.MCP_ROUND_SECONDS
    """The time after which a new round has no tools."""
    calls: int = limits.MCP_CALLS
    """The most calls that are run, approved ones included."""


LIMITS = ToolLoopLimits()


def respond(
    request: GenerateRequest,
    tools: McpTools,
    connectors: Connectors,
    pool: Pool,
    limits: ToolLoopLimits = LIMITS,
) -> AsyncGenerator[Event]:
    """Yield the events, as `generate` does, with the tools of MCP servers in addition to those of
    the conversation.

    Errors in the request are raised before `Started`. The servers list their tools and run the
    approved calls before it too; both are reported right after it.
    """
    if not tools.servers and not tools.approvals:
        return generate(request, pool)
    return _respond(request, tools, connectors, pool, limits)


async def _respond(
    request: GenerateRequest,
    tools: McpTools,
    connectors: Connectors,
    pool: Pool,
    limits: ToolLoopLimits,
) -> AsyncGenerator[Event]:
    _check(request, tools, limits)
    async with connectors.open(tools.servers) as toolset:
        # in a thread, since checking the schemas of the servers' tools may take long
        rounds = await in_thread(_Rounds, request, tools, toolset, pool, limits)
        async with aclosing(rounds.events()) as events:
            async for event in events:
                yield event


def _check(request: GenerateRequest, tools: McpTools, limits: ToolLoopLimits) -> None:
    if len(tools.approvals) > limits.calls:
        raise BadRequest(
            f"`input` has {len(tools.approvals)} pending approvals; one response runs at most "
            f"{limits.calls} of them. Send fewer.",
            param="input",
        )
    assert len(request.prompts) == request.n == 1, "a loop has one answer"
    labels = {server.label for server in tools.servers}
    named = {"input": [approval.server for approval in tools.approvals]}
    named["tool_choice"] = [tools.choice.server] if tools.choice else []
    for param, names in named.items():
        for name in names:
            if name not in labels:
                raise BadRequest(
                    f"`{param}` names the MCP server {name[:64]!r}, which is not in `tools`.",
                    param=param,
                )


class _Rounds:
    def __init__(
        self,
        request: GenerateRequest,
        tools: McpTools,
        toolset: Toolset,
        pool: Pool,
        limits: ToolLoopLimits,
    ) -> None:
        conversation = request.prompts[0]
        assert isinstance(conversation, Conversation)
        self._request = request
        self._toolset = toolset
        self._pool = pool
        self._limits = limits
        self._mcp = tools
        self._tools = ServerTools(toolset, conversation.tools)
        self._conversation = replace(
            conversation,
            messages=tuple(map(self._tools.renamed, conversation.messages)),
            tools=(*conversation.tools, *(each.tool for each in self._tools.by_name.values())),
        )
        self._ends = time.monotonic() + limits.seconds
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
            runs = turn.runs()
            if runs:
                self._rounds += 1
                self._conversation = self._conversation.with_answer(turn.message())
                async with aclosing(self._run(runs)) as finished:
                    async for event in finished:
                        yield event
            assert turn.answer.finished
            is_cut = turn.answer.finished.reason == "length" or bool(
                runs and self._tokens_left() == 0
            )
            if not runs or is_cut or turn.awaits_client:
                yield self._end(turn, "length" if is_cut else None)
                return
            choice = "none" if self._is_spent() or self._request.tool_choice == "none" else "auto"

    async def _round(self, turn: ToolTurn, choice: ToolChoice) -> AsyncGenerator[Event]:
        try:
            async with aclosing(self._generated(turn, choice)) as events:
                async for event in events:
                    yield event
        except ContextTooLong:
            if not self._runs:
                raise
            self._conversation = _without_last_results(self._conversation)
            async with aclosing(self._generated(turn, choice)) as events:
                async for event in events:
                    yield event

    async def _generated(self, turn: ToolTurn, choice: ToolChoice) -> AsyncGenerator[Event]:
        request = replace(
            self._request,
            prompts=(self._conversation,),
            tool_choice=choice,
            max_tokens=self._tokens_left(),
        )
        async with aclosing(generate(request, self._pool)) as events:
            async for event in events:
                if not isinstance(event, Started):
                    if isinstance(event, Finished):
                        self._finished.append(event)
                    for visible in turn.visible_events(event):
                        yield visible
                    continue
                self._started.append(event)
                if len(self._started) == 1:
                    yield replace(event, unfinished=self._unfinished)

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
        results: dict[int, str] = {}
        try:
            waiting = set(running)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
                for task in done:
                    call, (output, error) = running[task], task.result()
                    results[call.number] = error or output or ""
                    yield McpCallFinished(0, call.number, output, error)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        for call in calls:
            self._add_result(call, results[call.number])

    async def _result(self, call: TurnCall) -> tuple[str | None, str | None]:
        assert call.offered
        arguments = "".join(call.arguments)
        try:
            return await self._toolset.call(call.offered.server, call.offered.name, arguments), None
        except McpError as error:  # the log has no message, which may quote the server or client
            log.warning("a call of an MCP tool failed (%s)", error.kind)
            return None, str(error)

    def _add_result(self, call: TurnCall, text: str) -> None:
        result = Message("tool", text, name=call.name, tool_call_id=call.id)
        self._conversation = replace(
            self._conversation, messages=(*self._conversation.messages, result)
        )

    def _calls_left(self) -> int:
        most, requested = self._limits.calls, self._mcp.max_calls
        return max(0, min(most, most if requested is None else requested) - self._runs)

    def _is_spent(self) -> bool:
        late = time.monotonic() > self._ends
        return late or self._rounds >= self._limits.rounds or not self._calls_left()

    def _tokens_left(self) -> int | None:
        """The rest of `max_tokens`, which all rounds share; None if there is no limit."""
        most = self._request.max_tokens
        used = sum(finished.completion_tokens for finished in self._finished)
        return None if most is None else max(0, most - used)

    def _end(self, turn: ToolTurn, reason: FinishReason | None) -> Finished:
        self._ended = True
        rounds = self._finished
        counts = total([*(each.counts for each in rounds), self._further()])
        ended: FinishReason = "tool_calls" if turn.has_functions else "stop"
        return Finished(
            0,
            reason or ended,
            **asdict(counts),
            answer_forced=any(each.answer_forced for each in rounds),
            messages=(*self._added_messages(), *rounds[-1].messages),
            raw=tuple(text for each in rounds for text in each.raw),
        )

    def _added_messages(self) -> tuple[Mapping[str, Any], ...]:
        """The messages that earlier rounds have added to the first prompt."""
        first, last = self._started[0], self._started[-1]
        return last.messages[len(first.messages) :]


def _with_message(conversation: Conversation, message: Message) -> Conversation:
    return replace(conversation, messages=(*conversation.messages, message))


def _with_calls(conversation: Conversation, calls: Sequence[ToolCall]) -> Conversation:
    """The conversation with the calls in its last message, or in a new one if that is not the
    assistant's or has calls already."""
    *before, last = conversation.messages
    if last.role != "assistant" or last.tool_calls:
        return _with_message(conversation, Message("assistant", tool_calls=tuple(calls)))
    return replace(conversation, messages=(*before, replace(last, tool_calls=tuple(calls))))


def _without_last_results(conversation: Conversation) -> Conversation:
    messages = list(conversation.messages)
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].role != "tool":
            break
        size = len(messages[at].content)
        notice = f"[The result has {size} characters, which do not fit the context.]"
        messages[at] = replace(messages[at], content=notice[: max(size, 1)])
    return replace(conversation, messages=tuple(messages))
