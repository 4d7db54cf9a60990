"""Events to the wire: a body, or the chunks of a stream."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from mlx_server.events import Event, Finished, ReasoningDelta, Started, TextDelta, TokenLogprob

Wire = dict[str, Any]


@dataclass
class Choice:
    """One answer, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int = 0


class ChatOutput:
    def __init__(self, *, model: str, n: int, logprobs: bool, include_usage: bool) -> None:
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._choices = [Choice() for _ in range(n)]
        self._prompt_tokens = self._cached_tokens = 0
        self._head: Wire = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def gather(self, events: AsyncIterator[Event]) -> Wire:
        async for event in events:
            self._fold(event)
        choices = [self._choice(i, choice) for i, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[Wire]:
        self._head["object"] = "chat.completion.chunk"
        async for event in events:
            self._fold(event)
            match event:
                case Started():
                    for index in range(len(self._choices)):
                        yield self._chunk(index, {"role": "assistant", "content": ""})
                case TextDelta(index, text, logprobs):
                    yield self._chunk(index, {"content": text}, logprobs)
                case ReasoningDelta(index, text):
                    yield self._chunk(index, {"reasoning_content": text, "reasoning": text})
                case Finished(index, reason):
                    yield self._chunk(index, {}, finish_reason=reason)
        if self._include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _fold(self, event: Event) -> None:
        match event:
            case Started():
                self._head["model"] = event.model
                self._prompt_tokens = event.prompt_tokens
                self._cached_tokens = event.cached_tokens
            case TextDelta(index, text, logprobs):
                self._choices[index].texts.append(text)
                self._choices[index].logprobs.extend(logprobs)
            case ReasoningDelta(index, text):
                self._choices[index].reasoning.append(text)
            case Finished(index, reason, tokens):
                self._choices[index].finish_reason = reason
                self._choices[index].tokens = tokens

    def _chunk(
        self,
        index: int,
        delta: Wire,
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
    ) -> Wire:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _choice(self, index: int, choice: Choice) -> Wire:
        reasoning = "".join(choice.reasoning)
        thought = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
        message = {
            "role": "assistant",
            "content": "".join(choice.texts),
            "refusal": None,
            **thought,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _usage(self) -> Wire:
        completion = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


def _logprobs(tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> Wire:
    content = [{**_token(t), "top_logprobs": [_token(top) for top in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> Wire:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}
