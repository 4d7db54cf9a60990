"""Folds events into a response and the events of its stream.

A response that is not streamed is made from the same stream events.
"""

import time
from collections.abc import Iterable, Iterator

from mlx_server.api.accumulator import (
    Accumulator,
    KeptLogprobs,
    openai_tier,
    prediction_tokens,
    prompt_progress,
)
from mlx_server.api.responses import stream
from mlx_server.api.responses.items import Seal, Wire
from mlx_server.api.responses.stream import End, OutputItem
from mlx_server.api.responses.tools import NO_TABLE, ToolTable
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
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    ToolsListed,
)

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
        self._text: stream.TextItem | None = None
        """The open item that gets text or reasoning."""
        self._kept_logprobs = KeptLogprobs()
        self._calls: dict[int, stream.StreamedCall] = {}
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

    def queue(self) -> Iterator[Wire]:
        """The events of a response that waits for its turn."""
        self._response["status"] = "queued"
        self._begun = True
        yield from self._numbered([self._status_event("created"), self._status_event("queued")])

    def add(self, event: Event) -> None:
        for _ in self.chunks(event):
            pass

    def body(self) -> Wire:
        return self.response

    def chunks(self, event: Event) -> Iterator[Wire]:
        return self._numbered(self._chunks_of(event))

    def fail(self, error: ServerError) -> Iterator[Wire]:
        code = "invalid_prompt" if isinstance(error, BadRequest) else "server_error"
        failure = {"code": code, "message": error.message}
        event = {"code": error.code, "message": error.message, "param": error.param}
        yield from self._numbered([*self._close("incomplete"), {"type": "error", **event}])
        yield from self._numbered([self._ended("failed", "failed", error=failure)])

    def cancel(self) -> Iterator[Wire]:
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

    def _numbered(self, events: Iterable[Wire]) -> Iterator[Wire]:
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

    def _chunks_of(self, event: Event) -> Iterator[Wire]:
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
                kind = stream.CLIENT_CALLS[called.kind if called else "function"]
                yield from self._open(call, kind(event, called))
            case McpCallStarted(_, call):
                yield from self._open(call, stream.StreamedMcpCall(event))
            case ToolCallDelta(_, call, arguments) | McpCallDelta(_, call, arguments):
                yield from self._calls[call].add(arguments)
            case McpCallReady(_, call):
                yield from self._calls[call].finished_events()
            case ToolCallFinished(_, call):
                yield from self._calls.pop(call).end("completed")
            case McpCallFinished(_, call):
                run_here = self._calls.pop(call)
                assert isinstance(run_here, stream.StreamedMcpCall)
                yield from run_here.run(event)
            case BuiltInCall():
                yield from self._add_built_in(event)
            case ToolsListed():
                yield from self._whole(stream.McpToolList(event))
            case ApprovalRequested():
                yield from self._whole(stream.McpApproval(event))
            case Finished():
                yield from self._finish(event)

    def _start(self, event: Started) -> Iterator[Wire]:
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

    def _add_text(self, event: TextDelta) -> Iterator[Wire]:
        if event.text or event.logprobs:
            continues = self._continues_text(event)
            if not continues:
                yield from self._continue_item(stream.StreamedMessage(event.phase))
            assert self._text
            text = event.separated if continues else event.text
            self._kept_logprobs.add(event.logprobs)
            yield from self._text.add(text, event.logprobs)

    def _continues_text(self, event: TextDelta) -> bool:
        item = self._text
        return isinstance(item, stream.StreamedMessage) and event.phase in (None, item.phase)

    def _add_reasoning(self, event: ReasoningDelta) -> Iterator[Wire]:
        if event.text:
            is_open = isinstance(self._text, stream.StreamedReasoning)
            continues = is_open and not event.begins_message
            if not continues:
                yield from self._continue_item(self._reasoning())
            assert self._text
            yield from self._text.add(event.separated if continues else event.text)

    def _reasoning(self) -> stream.StreamedReasoning:
        kind = stream.SummarizedReasoning if self._summarizes else stream.StreamedReasoning
        return kind(self._seal)

    def _add_built_in(self, event: BuiltInCall) -> Iterator[Wire]:
        """Nothing runs it, so it is one of the model's thoughts."""
        if event.text:
            reasoning = self._reasoning()
            yield from self._add(reasoning)
            yield from reasoning.add(event.text)
            yield from reasoning.end("completed" if event.is_whole else "incomplete")

    def _continue_item(self, item: stream.TextItem) -> Iterator[Wire]:
        yield from self._add(item)
        self._text = item

    def _open(self, call: int, item: stream.StreamedCall) -> Iterator[Wire]:
        yield from self._add(item)
        self._calls[call] = item

    def _whole(self, item: OutputItem) -> Iterator[Wire]:
        yield from self._add(item)
        yield from item.end("completed")

    def _add(self, item: OutputItem) -> Iterator[Wire]:
        yield from self._end_text("completed")
        item.output_index = len(self._items)
        self._items.append(item)
        yield from item.begin()

    def _end_text(self, status: End) -> Iterator[Wire]:
        text, self._text = self._text, None
        if text:
            yield from text.end(status)

    def _close(self, status: End) -> Iterator[Wire]:
        """Ends the open items. Calls that are still open were cut off, so they are incomplete."""
        yield from self._end_text(status)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            yield from call.end("incomplete")

    def _finish(self, event: Finished) -> Iterator[Wire]:
        cut = event.reason == "length"
        has_answer = bool(self._items) and self._items[-1].kind not in NO_ANSWER
        if event.reason == "stop" and not has_answer:
            yield from self._continue_item(stream.StreamedMessage())
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
