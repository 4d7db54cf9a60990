"""The output items of a response while they are generated, the events of their changes, and the
response that they make together.

A response that is not streamed is made from the same stream events.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from mlx_server.api.accumulator import (
    Accumulator,
    KeptLogprobs,
    arguments_object,
    logprob_json,
    openai_tier,
    prediction_tokens,
    prompt_progress,
)
from mlx_server.api.freeform import FreeformInput
from mlx_server.api.responses.items import Seal, Wire, new_item_id
from mlx_server.api.responses.tools import NO_TABLE, OfferedTool, ToolTable
from mlx_server.errors import BadRequest, ServerError
from mlx_server.events import (
    ApprovalRequested,
    BuiltInCall,
    Event,
    Finished,
    McpCallDelta,
    McpCallFinished,
    McpCallReady,
    McpCallStarted,
    PromptProgress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    ToolsListed,
)
from mlx_server.messages import EXTRA_CONTENT, Phase

Events = Iterator[Wire]
End = Literal["completed", "incomplete"]


class OutputItem:
    kind = ""

    output_index: int
    """Set when the item is added to the response."""

    def __init__(self) -> None:
        self.id = new_item_id(self.kind)
        self.status = "in_progress"

    def wire(self) -> Wire:
        """The current state of the item."""
        raise NotImplementedError

    def begin(self) -> Events:
        yield self._whole("output_item.added")

    def end(self, status: End) -> Events:
        self.status = status
        yield self._whole("output_item.done")

    def _head(self) -> Wire:
        return {"id": self.id, "type": self.kind, "status": self.status}

    def _whole(self, what: str) -> Wire:
        return {"type": f"response.{what}", "output_index": self.output_index, "item": self.wire()}

    def _event(self, what: str, **more: object) -> Wire:
        place = {"item_id": self.id, "output_index": self.output_index}
        return {"type": f"response.{what}", **place, **more}


class TextItem(OutputItem):
    """An item with one part of content, which is streamed."""

    part = ""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[str] = []
        self._begun = False

    def begin(self) -> Events:
        yield from super().begin()
        self._begun = True
        yield self._event("content_part.added", content_index=0, part=self._part())

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        self._pieces.append(text)
        more = self._logprobs(logprobs)
        yield self._event(f"{self.part}.delta", content_index=0, delta=text, **more)

    def end(self, status: End) -> Events:
        part = self._part()
        final = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield self._event(f"{self.part}.done", content_index=0, **final)
        yield self._event("content_part.done", content_index=0, part=part)
        yield from super().end(status)

    def _content(self) -> list[Wire]:
        return [self._part()] if self._begun else []

    def _part(self) -> Wire:
        return {"type": self.part, "text": "".join(self._pieces)}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Wire:
        return {}


class StreamedReasoning(TextItem):
    kind, part = "reasoning", "reasoning_text"

    def __init__(self, seal: Seal | None) -> None:
        super().__init__()
        self._seal = seal

    def wire(self) -> Wire:
        more = {}
        if self._seal and self.status != "in_progress":
            more = {"encrypted_content": self._seal("".join(self._pieces))}
        return {**self._head(), "summary": self._summary(), "content": self._content(), **more}

    def _summary(self) -> list[Wire]:
        return []


class SummarizedReasoning(StreamedReasoning):
    """Reasoning that is also sent as its summary, which many clients show in its place. The model
    writes no other summary, so both are the same text."""

    def begin(self) -> Events:
        yield from super().begin()
        yield self._summary_event("part.added", part=_summary_part(""))

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        yield from super().add(text, logprobs)
        yield self._summary_event("text.delta", delta=text)

    def end(self, status: End) -> Events:
        text = "".join(self._pieces)
        yield self._summary_event("text.done", text=text)
        yield self._summary_event("part.done", part=_summary_part(text))
        yield from super().end(status)

    def _summary_event(self, what: str, **more: object) -> Wire:
        return self._event(f"reasoning_summary_{what}", summary_index=0, **more)

    def _summary(self) -> list[Wire]:
        return [_summary_part("".join(self._pieces))] if self._begun else []


class StreamedMessage(TextItem):
    kind, part = "message", "output_text"

    def __init__(self, phase: Phase | None = None) -> None:
        super().__init__()
        self.phase = phase
        self._tokens: list[msgspec.Raw] = []
        """JSON of each token's log probabilities, which four events have: encoding a million of
        them would keep all else waiting."""

    def wire(self) -> Wire:
        phase = {"phase": self.phase} if self.phase else {}
        return {**self._head(), "role": "assistant", **phase, "content": self._content()}

    def _part(self) -> Wire:
        return {**super()._part(), "annotations": [], "logprobs": list(self._tokens)}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Wire:
        added = list(map(logprob_json, logprobs))
        self._tokens += added
        return {"logprobs": added}


class StreamedCall(OutputItem):
    """An item with arguments, which are streamed."""

    arguments = ""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[str] = []
        self._whole_arguments = False

    def add(self, arguments: str) -> Events:
        self._pieces.append(arguments)
        yield self._event(f"{self.arguments}.delta", delta=arguments)

    def finished_events(self) -> Events:
        """The event that the arguments are complete, unless it has been sent."""
        if not self._whole_arguments:
            self._whole_arguments = True
            yield self._event(f"{self.arguments}.done", **self._final_fields())

    def end(self, status: End) -> Events:
        yield from self.finished_events()
        yield from super().end(status)

    def _final_fields(self) -> Wire:
        return {"arguments": "".join(self._pieces)}


class StreamedMcpCall(StreamedCall):
    kind, arguments = "mcp_call", "mcp_call_arguments"

    def __init__(self, call: McpCallStarted) -> None:
        super().__init__()
        self._call = call
        self._result: McpCallFinished | None = None

    def wire(self) -> Wire:
        result, error = self._result, None
        if result and result.error is not None:
            content = [{"type": "text", "text": result.error}]
            error = {"type": "mcp_tool_execution_error", "content": content}
        return {
            **self._head(),
            "server_label": self._call.server,
            "name": self._call.name,
            **self._final_fields(),
            "approval_request_id": self._call.approval,
            **_extra(self._call.extra_content),
            "output": result.output if result else None,
            "error": error,
        }

    def begin(self) -> Events:
        yield from super().begin()
        yield self._event("mcp_call.in_progress")

    def run(self, result: McpCallFinished) -> Events:
        self._result = result
        yield from self.finished_events()
        failed = result.error is not None
        yield self._event("mcp_call.failed" if failed else "mcp_call.completed")
        self.status = "failed" if failed else "completed"
        yield self._whole("output_item.done")


class McpToolList(OutputItem):
    """The tools of an MCP server, which are all there when it begins. It has no status."""

    kind = "mcp_list_tools"

    def __init__(self, listed: ToolsListed) -> None:
        super().__init__()
        self._listed = listed

    def wire(self) -> Wire:
        listed = self._listed if self.status != "in_progress" else ToolsListed(0, "")
        tools = [
            {
                "name": tool.name,
                "description": tool.description,
                "input_schema": tool.schema,
                "annotations": tool.annotations,
            }
            for tool in listed.tools
        ]
        named = {"id": self.id, "type": self.kind, "server_label": self._listed.server}
        return {**named, "tools": tools, "error": listed.error}

    def begin(self) -> Events:
        yield from super().begin()
        yield self._event("mcp_list_tools.in_progress")

    def end(self, status: End) -> Events:
        failed = self._listed.error is not None and not self._listed.tools
        yield self._event("mcp_list_tools.failed" if failed else "mcp_list_tools.completed")
        yield from super().end(status)


class McpApproval(OutputItem):
    """A request for the user's approval of a call. It has no status either."""

    kind = "mcp_approval_request"

    def __init__(self, request: ApprovalRequested) -> None:
        super().__init__()
        self.id = request.id
        self._request = request

    def wire(self) -> Wire:
        return {
            "id": self.id,
            "type": self.kind,
            "server_label": self._request.server,
            "name": self._request.name,
            "arguments": self._request.arguments,
            **_extra(self._request.extra_content),
        }


def _extra(extra: Mapping[str, Any] | None) -> Wire:
    """An upstream's own fields of a call, which it needs back."""
    return {EXTRA_CONTENT: extra} if extra else {}


def _summary_part(text: str) -> Wire:
    return {"type": "summary_text", "text": text}


class StreamedFunctionCall(StreamedCall):
    kind, arguments = "function_call", "function_call_arguments"

    def __init__(self, call: ToolCallStarted, called: OfferedTool | None) -> None:
        """called: the tool, None if the request did not list it."""
        super().__init__()
        self._call, self._called = call, called

    def wire(self) -> Wire:
        called = self._called or self._call
        namespace = self._called.namespace if self._called else None
        named = {"call_id": self._call.id, "name": called.name}
        named |= {"namespace": namespace} if namespace else {}
        extra = _extra(self._call.extra_content)
        return {**self._head(), **named, **self._final_fields(), **extra}


class StreamedCustomCall(StreamedFunctionCall):
    """A call of a tool whose input is free text."""

    kind, arguments = "custom_tool_call", "custom_tool_call_input"

    def __init__(self, call: ToolCallStarted, called: OfferedTool | None) -> None:
        super().__init__(call, called)
        self._input = FreeformInput()

    def add(self, arguments: str) -> Events:
        yield from self._delta(self._input.feed(arguments))

    def end(self, status: End) -> Events:
        if status == "completed":
            yield from self._delta(self._input.finish())
        yield from super().end(status)

    def _delta(self, text: str) -> Events:
        if text:
            yield self._event(f"{self.arguments}.delta", delta=text)

    def _final_fields(self) -> Wire:
        return {"input": self._input.text}


class StreamedToolSearch(StreamedFunctionCall):
    """A search for tools, which the client runs. It has no events for its arguments."""

    kind = "tool_search_call"

    def wire(self) -> Wire:
        text = "".join(self._pieces) if self.status == "completed" else ""
        called = {"call_id": self._call.id, "execution": "client"}
        return {**self._head(), **called, "arguments": arguments_object(text)}

    def add(self, arguments: str) -> Events:
        self._pieces.append(arguments)
        yield from ()

    def finished_events(self) -> Events:
        yield from ()


CLIENT_CALLS: dict[str, type[StreamedFunctionCall]] = {
    "function": StreamedFunctionCall,
    "custom": StreamedCustomCall,
    "tool_search": StreamedToolSearch,
}


SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")

NO_ANSWER = frozenset({"reasoning", "mcp_call", "mcp_list_tools"})
"""Kinds of items that do not count as an answer, so a message must follow them: clients need one to
go on."""

BROKEN = "The answer ended early: an internal error of the server."


class ResponseOutput:
    def __init__(
        self,
        response: Wire,
        *,
        seal: Seal | None = None,
        summarizes: bool = False,
        table: ToolTable = NO_TABLE,
    ) -> None:
        """`response` is a new one without output. `seal`: reasoning also comes encoded by it,
        for the client to send back. `summarizes`: reasoning also comes as its own summary.
        `table`: what the names of calls mean."""
        self._response = response
        self._seal = seal
        self._summarizes = summarizes
        self._table = table
        self._items: list[OutputItem] = []
        self._text: TextItem | None = None
        """The open item that gets text or reasoning."""
        self._kept_logprobs = KeptLogprobs()
        self._calls: dict[int, StreamedCall] = {}
        """The open calls, by the index of their events."""
        self._accumulator = Accumulator(model=response["model"], prompts=1, n=1)
        self._number = 0
        self._began = time.monotonic()
        self._begun = False
        self._ignored: list[str] | None = None

    @property
    def response(self) -> Wire:
        """The current state of the response."""
        return {**self._response, "output": [item.wire() for item in self._items]}

    def add_ignored(self, names: Iterable[str]) -> None:
        """Lists ignored parameters in the response itself, those that the model ignores included:
        for responses without HTTP headers."""
        self._ignored = list(names)

    def queue(self) -> Events:
        """The events of a response that waits for its turn."""
        self._response["status"] = "queued"
        self._begun = True
        yield from self._numbered([self._status_event("created"), self._status_event("queued")])

    def add(self, event: Event) -> None:
        for _ in self.chunks(event):
            pass

    def body(self) -> Wire:
        return self.response

    def chunks(self, event: Event) -> Events:
        return self._numbered(self._chunks_of(event))

    def fail(self, error: ServerError) -> Events:
        code = "invalid_prompt" if isinstance(error, BadRequest) else "server_error"
        failure = {"code": code, "message": error.message}
        event = {"code": error.code, "message": error.message, "param": error.param}
        yield from self._numbered([*self._close("incomplete"), {"type": "error", **event}])
        yield from self._numbered([self._ended("failed", "failed", error=failure)])

    def cancel(self) -> Events:
        yield from self._numbered(self._close("incomplete"))
        yield from self._numbered([self._ended("cancelled", "incomplete")])

    def alive(self, number: int | None = None) -> Wire:
        """An event for a client that counts events, while there is no other one to send. `number`:
        that of the last event, if clients may read the events again from a number on."""
        is_queued = self._response["status"] == "queued"
        event = self._status_event("queued" if is_queued else "in_progress")
        if number is None:
            (event,) = self._numbered([event])
            return event
        return {**event, "sequence_number": number}

    def _numbered(self, events: Iterable[Wire]) -> Events:
        for event in events:
            number, self._number = self._number, self._number + 1
            yield {"type": event["type"], "sequence_number": number, **event}

    def _status_event(self, what: str) -> Wire:
        return {"type": f"response.{what}", "response": self.response}

    def _ended(self, status: str, event: str, **more: object) -> Wire:
        warnings = self._accumulator.warnings(
            *self._accumulator.answers, ignored=self._ignored or ()
        )
        self._response.update(status=status, **more, **warnings)
        return self._status_event(event)

    def _chunks_of(self, event: Event) -> Events:
        self._accumulator.add(event)
        match event:
            case Started():
                yield from self._start(event)
            case PromptProgress():
                progress = prompt_progress(event, time.monotonic() - self._began)
                yield {**self._status_event("in_progress"), **progress}
            case TextDelta():
                yield from self._add_text(event)
            case ReasoningDelta():
                yield from self._add_reasoning(event)
            case ToolCallStarted(_, call):
                called = self._table.called(event.name)
                kind = CLIENT_CALLS[called.kind if called else "function"]
                yield from self._open(call, kind(event, called))
            case McpCallStarted(_, call):
                yield from self._open(call, StreamedMcpCall(event))
            case ToolCallDelta(_, call, arguments) | McpCallDelta(_, call, arguments):
                yield from self._calls[call].add(arguments)
            case McpCallReady(_, call):
                yield from self._calls[call].finished_events()
            case ToolCallFinished(_, call):
                yield from self._calls.pop(call).end("completed")
            case McpCallFinished(_, call):
                run_here = self._calls.pop(call)
                assert isinstance(run_here, StreamedMcpCall)
                yield from run_here.run(event)
            case BuiltInCall():
                yield from self._add_built_in(event)
            case ToolsListed():
                yield from self._whole(McpToolList(event))
            case ApprovalRequested():
                yield from self._whole(McpApproval(event))
            case Finished():
                yield from self._finish(event)

    def _start(self, event: Started) -> Events:
        if self._ignored is not None:
            self._ignored += event.ignored
        self._response.update(status="in_progress", model=event.model)
        self._response["service_tier"] = openai_tier(event.service_tier) or "default"
        if event.sampling:
            used = {name: getattr(event.sampling, name) for name in SAMPLING}
            self._response.update(used)
        if not self._begun:
            self._begun = True
            yield self._status_event("created")
        yield self._status_event("in_progress")

    def _add_text(self, event: TextDelta) -> Events:
        if event.text or event.logprobs:
            continues = self._continues_text(event)
            if not continues:
                yield from self._continue_item(StreamedMessage(event.phase))
            assert self._text
            text = event.separated if continues else event.text
            self._kept_logprobs.add(event.logprobs)
            yield from self._text.add(text, event.logprobs)

    def _continues_text(self, event: TextDelta) -> bool:
        item = self._text
        return isinstance(item, StreamedMessage) and event.phase in (None, item.phase)

    def _add_reasoning(self, event: ReasoningDelta) -> Events:
        if event.text:
            is_open = isinstance(self._text, StreamedReasoning)
            continues = is_open and not event.begins_message
            if not continues:
                yield from self._continue_item(self._reasoning())
            assert self._text
            yield from self._text.add(event.separated if continues else event.text)

    def _reasoning(self) -> StreamedReasoning:
        kind = SummarizedReasoning if self._summarizes else StreamedReasoning
        return kind(self._seal)

    def _add_built_in(self, event: BuiltInCall) -> Events:
        """Nothing runs it, so it is one of the model's thoughts."""
        if event.text:
            reasoning = self._reasoning()
            yield from self._add(reasoning)
            yield from reasoning.add(event.text)
            yield from reasoning.end("completed" if event.is_whole else "incomplete")

    def _continue_item(self, item: TextItem) -> Events:
        yield from self._add(item)
        self._text = item

    def _open(self, call: int, item: StreamedCall) -> Events:
        yield from self._add(item)
        self._calls[call] = item

    def _whole(self, item: OutputItem) -> Events:
        yield from self._add(item)
        yield from item.end("completed")

    def _add(self, item: OutputItem) -> Events:
        yield from self._end_text("completed")
        item.output_index = len(self._items)
        self._items.append(item)
        yield from item.begin()

    def _end_text(self, status: End) -> Events:
        text, self._text = self._text, None
        if text:
            yield from text.end(status)

    def _close(self, status: End) -> Events:
        """Ends the open items. Calls that are still open were cut off, so they are incomplete."""
        yield from self._end_text(status)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            yield from call.end("incomplete")

    def _finish(self, event: Finished) -> Events:
        cut = event.reason == "length"
        has_answer = bool(self._items) and self._items[-1].kind not in NO_ANSWER
        if event.reason == "stop" and not has_answer:
            yield from self._continue_item(StreamedMessage())
        yield from self._close("incomplete" if cut else "completed")
        prompt, counts = self._accumulator.prompt_tokens, event.counts
        cached = {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0}
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": cached,
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": counts.reasoning_tokens,
                **prediction_tokens(counts),  # as in OpenAI's chat completions
                **self._accumulator.tool_output_tokens(),  # in vLLM's place
            },
            "total_tokens": prompt + counts.completion_tokens,
        }
        if cut:
            why = {"reason": "max_output_tokens"}
            yield self._ended("incomplete", "incomplete", usage=usage, incomplete_details=why)
        else:
            now = int(time.time())
            yield self._ended("completed", "completed", usage=usage, completed_at=now)
