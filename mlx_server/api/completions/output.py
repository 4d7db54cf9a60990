"""Folds events into a completion or the chunks of its stream."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from mlx_server.api.accumulator import Accumulator, prompt_logprobs_body, prompt_progress
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
        token_ids: bool = False,
        timings: bool = False,
    ) -> None:
        self._accumulator = Accumulator(model=model, prompts=prompts, n=n)
        self._offsets = [0] * (prompts * n)
        """The offset in characters of the next token, for each answer."""
        self._is_begun = [False] * (prompts * n)
        """Whether a chunk has been sent, for each answer."""
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._token_ids = token_ids
        self._timings = timings
        self._n = n
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._began = time.monotonic()
        self._created = int(time.time())

    async def aggregate(self, events: AsyncIterator[Event]) -> Wire:
        async for event in events:
            self._accumulator.add(event)
        choices = [
            {
                **self._choice(i, "".join(answer.texts), answer.logprobs, answer.finish_reason),
                **prompt_logprobs_body(self._accumulator.answers[i - i % self._n]),
                **self._ids(i, answer.token_ids, begins=True),
            }
            for i, answer in enumerate(self._accumulator.answers)
        ]
        usage = self._accumulator.usage()
        warnings = self._accumulator.warnings(*self._accumulator.answers)
        return {**self._head(), "choices": choices, "usage": usage, **self._timed(), **warnings}

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
            usage = self._accumulator.usage()
            yield {**self._head(), "choices": [], "usage": usage, **self._timed()}

    def _head(self) -> Wire:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._accumulator.model,
            **self._accumulator.fingerprint_fields(),
        }

    def _chunk(self, choice: Wire) -> Wire:
        index = choice["index"]
        begins, self._is_begun[index] = not self._is_begun[index], True
        ids = self._ids(index, self._accumulator.new_token_ids(index), begins=begins)
        choices = [{**choice, **ids}]
        return {**self._head(), "choices": choices, **self._usage(), **self._timed()}

    def _ids(self, index: int, ids: Sequence[int], *, begins: bool) -> Wire:
        """The answer's next tokens, after those of its prompt if it begins with them."""
        if not self._token_ids:
            return {}
        prompt = self._accumulator.prompt_token_ids[index // self._n]
        return {**({"prompt_token_ids": list(prompt)} if begins else {}), "token_ids": list(ids)}

    def _timed(self) -> Wire:
        return self._accumulator.timings() if self._timings else {}

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
