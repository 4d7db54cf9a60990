"""Events to the wire: a body, or the chunks of a stream."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_server.events import Event, Finished, Started, TextDelta, TokenLogprob

Wire = dict[str, Any]


@dataclass
class Choice:
    """One answer, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reported: int = 0
    """Characters of the tokens reported so far: where the next one begins."""
    finish_reason: str | None = None
    tokens: int = 0


class CompletionOutput:
    def __init__(self, *, model: str, answers: int, logprobs: bool, include_usage: bool) -> None:
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._choices = [Choice() for _ in range(answers)]
        self._prompt_tokens = self._cached_tokens = 0
        self._head: Wire = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def gather(self, events: AsyncIterator[Event]) -> Wire:
        async for event in events:
            self._fold(event)
        choices = [
            self._choice(i, "".join(choice.texts), choice.logprobs, choice.finish_reason)
            for i, choice in enumerate(self._choices)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[Wire]:
        async for event in events:
            self._fold(event)
            match event:
                case TextDelta(index, text, logprobs):
                    yield self._chunk(self._choice(index, text, logprobs, None))
                case Finished(index, reason):
                    yield self._chunk(self._choice(index, "", (), reason))
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
            case Finished(index, reason, tokens):
                self._choices[index].finish_reason = reason
                self._choices[index].tokens = tokens

    def _chunk(self, choice: Wire) -> Wire:
        usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None
    ) -> Wire:
        reported = self._reported(self._choices[index], logprobs) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": reported, "finish_reason": reason}

    def _reported(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> Wire:
        offsets = []
        for token in logprobs:
            offsets.append(choice.reported)
            choice.reported += len(token.token)
        return {
            "tokens": [token.token for token in logprobs],
            "token_logprobs": [token.logprob for token in logprobs],
            "top_logprobs": _tops(logprobs),
            "text_offset": offsets,
        }

    def _usage(self) -> Wire:
        completion = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


def _tops(tokens: Sequence[TokenLogprob]) -> list[dict[str, float | None] | None] | None:
    """None where none were asked for, and for a prompt's first token."""
    tops = [{top.token: top.logprob for top in token.top} or None for token in tokens]
    return tops if any(tops) else None
