"""The rows of one model: mlx-lm's BatchGenerator, with the step that chooses tokens replaced.

mlx-lm samples row by row and computes every row's log probabilities over the whole vocabulary at
every step. Here one `Sampler` chooses for all rows at once. The row objects travel through
mlx-lm's batches as its per-row "samplers", so they are merged, filtered and split with the caches.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    BatchGenerator,
    GenerationBatch,
    PromptProcessingBatch,
    StopSequences,
)
from mlx_lm.sample_utils import greedy_sampler

from mlx_server.engine.messages import Logprobs, Token
from mlx_server.engine.sampling import Row, RowLogprobs, Sampled, Sampler
from mlx_server.requests import SamplingParams

PREFILL_STEP = 512 if mx.metal.is_available() else 128
"""Tokens prefilled between two steps of the rows that decode."""


class Decode(GenerationBatch):
    # of mlx-lm's own state, what is read here
    uids: list[int]
    tokens: list[list[int]]
    samplers: list[Row]
    prompt_cache: list[Any]
    _next_tokens: mx.array
    _next_logprobs: list[RowLogprobs | None]

    _sampler: Sampler | None = None

    def _step(self) -> tuple[list[int], list[Logprobs | None]]:
        inputs, logprobs = self._next_tokens, self._next_logprobs
        self._current_tokens, self._current_logprobs = inputs, logprobs

        logits = self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :]
        sampled = self._choose(logits, inputs)
        self._next_tokens, self._next_logprobs = sampled.tokens, sampled.logprobs
        mx.async_eval(*sampled.pending)

        # Reading the previous step's tokens overlaps with computing this one's.
        ids = cast(list[int], inputs.tolist())
        for tokens, token in zip(self.tokens, ids, strict=True):
            tokens.append(token)
        return ids, [entry.read() if entry else None for entry in logprobs]

    def _choose(self, logits: mx.array, inputs: mx.array) -> Sampled:
        if self._sampler is None or self._sampler.rows != self.samplers:
            self._sampler = Sampler(self.samplers)
        return self._sampler(logits, inputs)


class Prefill(PromptProcessingBatch):
    uids: list[int]
    tokens: list[list[int]]
    samplers: list[Row]
    prompt_cache: list[Any]
    logits_processors: list[Any]
    max_tokens: list[int]

    def generate(self, tokens: list[list[int]]) -> Decode:
        """As in mlx-lm, but the rows go on in our own kind of batch."""
        if any(len(prompt) > 1 for prompt in tokens):
            self.prompt([prompt[:-1] for prompt in tokens])
        decode = Decode(
            self.model,
            self.uids,
            mx.array([prompt[-1] for prompt in tokens]),
            self.prompt_cache,
            self.tokens,
            self.samplers,
            self.fallback_sampler,
            self.logits_processors,
            self.stop_sequences,
            self.max_tokens,
        )
        self.uids, self.prompt_cache, self.tokens = [], [], []
        self.samplers, self.logits_processors, self.max_tokens = [], [], []
        return decode


class Batch(BatchGenerator):
    """Rows join and leave at any step; `step` gives each decoding row its next token."""

    def __init__(self, model: nn.Module, *, concurrency: int) -> None:
        super().__init__(
            model,
            completion_batch_size=concurrency,
            prefill_batch_size=min(8, concurrency),
            prefill_step_size=PREFILL_STEP,
        )
        self._prompt_batch = Prefill.empty(model, greedy_sampler, PREFILL_STEP)
        self._generation_batch = Decode.empty(model, greedy_sampler)
        self._row_of: dict[int, int] = {}
        self._uid_of: dict[int, int] = {}
        # The width shows in the shape of an output that is never computed.
        self.vocabulary: int = model(mx.array([[0]])).shape[-1]

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def prefill_batch_size(self) -> int:
        """How many rows may be in prefill: mlx-lm itself takes them in beside a full batch."""
        free: int = self.completion_batch_size - len(self._generation_batch)
        return min(self._prefill_rows, free)

    @prefill_batch_size.setter
    def prefill_batch_size(self, rows: int) -> None:
        self._prefill_rows = rows

    @property
    def rows(self) -> list[int]:
        return list(self._uid_of)

    @property
    def waiting(self) -> int:
        return len(self._row_of) - len(self._generation_batch)

    def add(
        self,
        number: int,
        prompt: list[int],
        max_tokens: int,
        stop_tokens: Sequence[int],
        sampling: SamplingParams,
        cache: list[Any] | None = None,
    ) -> None:
        """cache: of the whole prompt but its last token, if that has been computed."""
        done = len(prompt) - 1 if cache else 0
        (uid,) = self.insert(
            [prompt[done:]],
            [max_tokens],
            caches=[cache],
            all_tokens=[prompt[:done]],
            samplers=[Row(number, prompt, sampling, self.vocabulary)],
            stop_sequences=[_stop_sequences(tuple(stop_tokens))],
        )
        self._row_of[uid], self._uid_of[number] = number, uid

    def cancel(self, number: int) -> None:
        if (uid := self._uid_of.pop(number, None)) is not None:
            del self._row_of[uid]
            self.remove([uid])

    def step(self) -> list[Token]:
        _, responses = self.next()
        return [self._token(response) for response in responses]

    def _token(self, response: Any) -> Token:
        number = self._row_of[response.uid]
        if response.finish_reason is not None:
            del self._row_of[response.uid], self._uid_of[number]
        return Token(number, response.token, response.finish_reason, response.logprobs)


@lru_cache(maxsize=256)
def _stop_sequences(tokens: tuple[int, ...]) -> StopSequences:
    return StopSequences([[token] for token in tokens])
