"""Folds events into a completion or the chunks of its stream."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from mlx_server.api.accumulator import Accumulator, prompt_progress
from mlx_server.events import Event, Finished, PromptProgress, TextDelta, TokenLogprob

Wire = dict[str, Any]


class CompletionOutput:
    def __init__(
        self,
        *,
        model: str,
        prompts: int,
        n: int,
        logprobs: bool,
        include_usage: bool,
        continuous_usage: bool = False,
    ) -> None:
        self._accumulator = Accumulator(model=model, prompts=prompts, n=n)
        self._offsets = [0] * (prompts * n)
        """The offset in characters of the next token, for each answer."""
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._began = time.monotonic()
        self._created = int(time.time())

    async def aggregate(self, events: AsyncIterator[Event]) -> Wire:
        async for event in events:
            self._accumulator.add(event)
        choices = [
            self._choice(i, "".join(answer.texts), answer.logprobs, answer.finish_reason)
            for i, answer in enumerate(self._accumulator.answers)
        ]
        usage = self._accumulator.usage()
        warnings = self._accumulator.warnings(*self._accumulator.answers)
        return {**self._head(), "choices": choices, "usage": usage, **warnings}

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[Wire]:
        async for event in events:
            self._accumulator.add(event)
            match event:
                case PromptProgress(index):
                    progress = prompt_progress(event, time.monotonic() - self._began)
                    yield {**self._chunk(self._choice(index, "", (), None)), **progress}
                case TextDelta(index, text, logprobs):
                    yield self._chunk(self._choice(index, text, logprobs, None))
                case Finished(index, reason):
                    warnings = self._accumulator.warnings(self._accumulator.answers[index])
                    yield {**self._chunk(self._choice(index, "", (), reason)), **warnings}
        if self._include_usage:
            yield {**self._head(), "choices": [], "usage": self._accumulator.usage()}

    def _head(self) -> Wire:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._accumulator.model,
            **self._accumulator.fingerprint_fields(),
        }

    def _chunk(self, choice: Wire) -> Wire:
        return {**self._head(), "choices": [choice], **self._usage()}

    def _usage(self) -> Wire:
        """A chunk's `usage`: null, unless the client wants the usage so far with each chunk."""
        if not self._include_usage:
            return {}
        return {"usage": self._accumulator.usage() if self._continuous_usage else None}

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None
    ) -> Wire:
        reported = self._reported(index, logprobs) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": reported, "finish_reason": reason}

    def _reported(self, index: int, logprobs: Sequence[TokenLogprob]) -> Wire:
        offsets = []
        for token in logprobs:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.token)
        return {
            "tokens": [token.token for token in logprobs],
            "token_logprobs": [token.logprob for token in logprobs],
            "top_logprobs": _tops(logprobs),
            "text_offset": offsets,
        }


def _tops(tokens: Sequence[TokenLogprob]) -> list[dict[str, float | None] | None] | None:
    """None if none were requested; the entry of a prompt's first token is None too."""
    tops = [{top.token: top.logprob for top in token.top} or None for token in tokens]
    return tops if any(tops) else None
