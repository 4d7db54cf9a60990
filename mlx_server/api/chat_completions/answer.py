"""Folds events into a chat completion or the chunks of its stream."""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mlx_server.api.accumulator import (
    DEFAULT_REPORTING,
    Accumulator,
    CompletionsOutput,
    Reporting,
    Wire,
    logprob_json,
)
from mlx_server.api.freeform import FreeformInput, text_of_arguments
from mlx_server.events import (
    Answer,
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.messages import EXTRA_CONTENT, ToolCall

DETAILS = "reasoning_details"

REASONING_FIELDS: Mapping[str, Sequence[str]] = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}
"""Maps the setting to the fields that hold reasoning. OpenAI has no such field: DeepSeek named the
first, OpenRouter the second. Clients that take them for two names of one field refuse a message
with both."""


class ChatOutput(CompletionsOutput):
    PREFIX, BODY, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        n: int,
        reporting: Reporting = DEFAULT_REPORTING,
        *,
        freeform: Container[str] = (),
        reasoning_fields: Sequence[str] = REASONING_FIELDS["both"],
    ) -> None:
        """freeform: the names of the tools whose input is free text."""
        super().__init__(Accumulator(model, 1, n, keeps_logprobs=reporting.has_body), reporting)
        self._freeform = freeform
        self._reasoning_fields = reasoning_fields
        self._inputs: dict[tuple[int, int], FreeformInput] = {}
        """The texts of streamed calls, by the indices of answer and call."""

    def body(self) -> Wire:
        """The completion of the events so far."""
        choices = [self._choice(i, answer) for i, answer in enumerate(self._accumulator.answers)]
        return self._whole(choices)

    def chunks(self, event: Event) -> Iterator[Wire]:
        self._accumulator.add(event)
        match event:
            case TextDelta(index, _, logprobs):
                yield self._delta(index, {"content": event.separated}, logprobs)
            case ReasoningDelta(index) if self._reasoning_fields:
                yield self._delta(index, self._thought(event.separated))
            case ToolCallStarted(index) | ToolCallDelta(index) | ToolCallFinished(index):
                if delta := self._call_delta(event):
                    yield self._delta(index, delta)
            case Started():
                for index in range(len(self._accumulator.answers)):
                    yield self._delta(index, {"role": "assistant", "content": ""})
            case PromptProgress(index):
                yield {**self._delta(index, {}), **self._progress(event)}
            case Finished(index, reason):
                choice = _streamed(index, {}, finish_reason=reason)
                yield self._last_chunk([choice], self._accumulator.answers[index])

    def _delta(self, index: int, delta: Wire, logprobs: Sequence[TokenLogprob] = ()) -> Wire:
        scored = _logprobs(list(map(logprob_json, logprobs))) if logprobs else None
        return self._chunk([_streamed(index, delta, scored)])

    def _choice(self, index: int, answer: Answer) -> Wire:
        text, reasoning = answer.text, answer.thoughts
        thought = self._thought(reasoning) if reasoning else {}
        calls = self._calls(answer.calls) if answer.calls else {}
        logprobs = self._accumulator.logprobs[index]
        message = {
            "role": "assistant",
            "content": text or None if calls else text,
            "refusal": None,
            **thought,
            **calls,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(logprobs) if self._reporting.logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    def _thought(self, text: str) -> Wire:
        return dict.fromkeys(self._reasoning_fields, text)

    def _calls(self, calls: Sequence[ToolCall]) -> Wire:
        details = [each for call in calls for each in _details(call.extra_content).items()]
        return {**dict(details), "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: ToolCall) -> Wire:
        if call.name not in self._freeform:
            return _call(call)
        return _freeform_call(call, text_of_arguments(call.arguments))

    def _call_delta(self, event: ToolCallStarted | ToolCallDelta | ToolCallFinished) -> Wire:
        key, details = (event.index, event.call), {}
        match event:
            case ToolCallStarted(id=id, name=name, extra_content=extra):
                call, details = ToolCall(id, name, "", extra_content=extra), _details(extra)
                if name in self._freeform:
                    self._inputs[key] = FreeformInput()
                piece = _freeform_call(call, "") if name in self._freeform else _call(call)
            case ToolCallDelta(arguments=arguments) if key in self._inputs:
                piece = _freeform_delta(self._inputs[key].feed(arguments))
            case ToolCallDelta(arguments=arguments):
                piece = {"function": {"arguments": arguments}}
            case ToolCallFinished():
                text = self._inputs.pop(key).finish() if key in self._inputs else ""
                piece = _freeform_delta(text)
        return {**details, "tool_calls": [{"index": event.call, **piece}]} if piece else {}


def _streamed(
    index: int, delta: Wire, logprobs: Wire | None = None, finish_reason: str | None = None
) -> Wire:
    part = {"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return {"index": index, **part}


def _call(call: ToolCall) -> Wire:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function, **_extra(call)}


def _freeform_call(call: ToolCall, text: str) -> Wire:
    custom = {"name": call.name, "input": text}
    return {"id": call.id, "type": "custom", "custom": custom, **_extra(call)}


def _extra(call: ToolCall) -> Wire:
    """An upstream's own fields of a call, which clients send back as they do Google's."""
    extra = {k: v for k, v in (call.extra_content or {}).items() if k != DETAILS}
    return {EXTRA_CONTENT: extra} if extra else {}


def _details(extra: Mapping[str, Any] | None) -> Wire:
    """The details of the reasoning, which are the message's in this API."""
    return {DETAILS: extra[DETAILS]} if extra and DETAILS in extra else {}


def _freeform_delta(text: str) -> Wire:
    return {"custom": {"input": text}} if text else {}


def _logprobs(content: Sequence[msgspec.Raw]) -> Wire:
    return {"content": content, "refusal": None}
