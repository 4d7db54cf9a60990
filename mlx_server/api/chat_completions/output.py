"""Folds events into a chat completion or the chunks of its stream."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from mlx_server.api.accumulator import AccumulatedAnswer, Accumulator, prompt_progress
from mlx_server.events import (
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
)
from mlx_server.messages import ToolCall

Wire = dict[str, Any]


class ChatOutput:
    def __init__(self, *, model: str, n: int, logprobs: bool, include_usage: bool) -> None:
        self._accumulator = Accumulator(model=model, prompts=1, n=n)
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._began = time.time()
        self._created = int(self._began)

    async def aggregate(self, events: AsyncIterator[Event]) -> Wire:
        async for event in events:
            self._accumulator.add(event)
        choices = [self._choice(i, answer) for i, answer in enumerate(self._accumulator.answers)]
        usage = self._accumulator.usage()
        warnings = self._accumulator.warnings(*self._accumulator.answers)
        return {**self._head("chat.completion"), "choices": choices, "usage": usage, **warnings}

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[Wire]:
        async for event in events:
            self._accumulator.add(event)
            match event:
                case Started():
                    for index in range(len(self._accumulator.answers)):
                        yield self._chunk(index, {"role": "assistant", "content": ""})
                case PromptProgress(index):
                    progress = prompt_progress(event, time.time() - self._began)
                    yield {**self._chunk(index, {}), **progress}
                case TextDelta(index, text, logprobs):
                    yield self._chunk(index, {"content": text}, logprobs)
                case ReasoningDelta(index, text):
                    yield self._chunk(index, {"reasoning_content": text, "reasoning": text})
                case ToolCallStarted(index, call, id, name):
                    begun = {"index": call, **_call(ToolCall(id, name, ""))}
                    yield self._chunk(index, {"tool_calls": [begun]})
                case ToolCallDelta(index, call, arguments):
                    piece = {"index": call, "function": {"arguments": arguments}}
                    yield self._chunk(index, {"tool_calls": [piece]})
                case Finished(index, reason):
                    warnings = self._accumulator.warnings(self._accumulator.answers[index])
                    yield {**self._chunk(index, {}, finish_reason=reason), **warnings}
        if self._include_usage:
            usage = self._accumulator.usage()
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _head(self, kind: str) -> Wire:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._accumulator.model,
            **self._accumulator.fingerprint_fields(),
        }

    def _chunk(
        self,
        index: int,
        delta: Wire,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> Wire:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _choice(self, index: int, answer: AccumulatedAnswer) -> Wire:
        reasoning = "".join(answer.reasoning)
        text = "".join(answer.texts)
        thought = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
        calls = {"tool_calls": [_call(call) for call in answer.calls]} if answer.calls else {}
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
            "logprobs": _logprobs(answer.logprobs) if self._logprobs else None,
            "finish_reason": answer.finish_reason,
        }


def _call(call: ToolCall) -> Wire:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(tokens: Sequence[TokenLogprob]) -> Wire:
    content = [{**_token(t), "top_logprobs": [_token(top) for top in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> Wire:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}
