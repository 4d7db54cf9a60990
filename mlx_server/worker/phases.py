"""The two phases of a row, prefill and decode: the two halves of mlx-lm's BatchGenerator.

mlx-lm's batches carry the Row objects as their per-row "samplers", so that rows, and the adapters
that they name, are merged and filtered together with the caches.
"""

from contextlib import suppress
from typing import Any, cast

import mlx.core as mx

from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import Logprobs
from mlx_server.worker.constrained_decoding.mask_threads import SlowMask
from mlx_server.worker.lora.layers import RowAdapters, using
from mlx_server.worker.mlx_lm_internals import GenerationBatch, PromptProcessingBatch
from mlx_server.worker.row import LateDraw, Row
from mlx_server.worker.sampling import RowLogprobs, Sampled, Sampler, sample_rows_alone

PER_ROW = (
    *("uids", "tokens", "samplers", "logits_processors", "max_tokens", "stop_sequences"),
    *("_next_logprobs", "_token_context", "_num_tokens", "_matchers"),
)
"""The attributes of mlx-lm's batch that are lists with one entry for each row."""


class DecodeBatch(GenerationBatch):
    # The types of mlx-lm's own state that is used here.
    uids: list[int]
    tokens: list[list[int]]
    samplers: list[Row]
    prompt_cache: list[Any]
    _next_tokens: mx.array
    _next_logprobs: list[RowLogprobs | None]

    _made: tuple[Sampler, RowAdapters] | None = None

    def _step(self) -> tuple[list[int], list[Logprobs | None]]:
        inputs, logprobs = self._next_tokens, self._next_logprobs
        self._current_tokens, self._current_logprobs = inputs, logprobs

        sampler, rows = self._for_rows()
        with using(rows, self.model):
            logits = self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :]
        faults = [row.fault for row in self.samplers]
        sampled = self._sampled(sampler, logits, inputs)
        self._next_tokens, self._next_logprobs = sampled.tokens, sampled.logprobs
        mx.async_eval(*sampled.pending)

        # Reading the previous step's tokens overlaps with computing this one's.
        ids = cast(list[int], inputs.tolist())
        for tokens, token in zip(self.tokens, ids, strict=True):
            tokens.append(token)
        for row, fault in zip(self.samplers, faults, strict=True):
            row.error = fault()
        return ids, [entry.read() if entry else None for entry in logprobs]

    def _sampled(self, sampler: Sampler, logits: mx.array, inputs: mx.array) -> Sampled:
        mask, noise = None, None
        if sampler.constrained:
            with suppress(Exception):  # it is raised again below, where its row fails alone
                noise = sampler.noise(logits.shape[-1])
            mx.async_eval(logits, *(() if noise is None else (noise,)))
            mask = sampler.mask(inputs, logits.shape[-1])  # made while those are computed
        if late := sampler.late:
            return _sampled_but(late, self.samplers, logits, inputs, mask)
        return _drawn(sampler, logits, inputs, mask, noise)

    def draw_late(self) -> None:
        """Draws the next token of this one row, whose mask is made by now."""
        (row,) = self.samplers
        late, row.late = row.late, None
        assert late
        sampler = Sampler([row])
        mask = sampler.late_mask(late.mask, late.logits.shape[-1])
        sampled = _drawn(sampler, late.logits, late.inputs, mask)
        self._next_tokens, self._next_logprobs = sampled.tokens, sampled.logprobs
        mx.async_eval(*sampled.pending)

    def part(self, places: list[int]) -> "DecodeBatch":
        """Removes some rows and returns them as a batch, with their caches."""
        part = self._copied(places)
        self.filter([i for i in range(len(self)) if i not in places])
        return part

    def parts(self, places: list[int]) -> list["DecodeBatch"]:
        """Removes some rows and returns each as a batch, with its cache."""
        parts = [self._copied([place]) for place in places]
        self.filter([i for i in range(len(self)) if i not in places])
        return parts

    def _copied(self, places: list[int]) -> "DecodeBatch":
        part = self._rows(places)
        caches = [self.extract_cache(at) for at in places]
        part.prompt_cache = PrefillBatch(self.model, part.uids, caches).prompt_cache
        # Unevaluated slices would keep the caches of the whole batch in memory.
        mx.eval([cache.state for cache in part.prompt_cache])
        return part

    def part_without_cache(self, at: int) -> "DecodeBatch":
        one = self._rows([at])
        self.filter([i for i in range(len(self)) if i != at])
        return one

    def _rows(self, places: list[int]) -> "DecodeBatch":
        part: DecodeBatch = DecodeBatch.empty(self.model, self.fallback_sampler)
        for name in PER_ROW:
            values = getattr(self, name)
            setattr(part, name, [values[at] for at in places])
        part._next_tokens = self._next_tokens[mx.array(places)]
        return part

    def _for_rows(self) -> tuple[Sampler, RowAdapters]:
        """Returns the rows' sampler and adapters, made again only when the rows have changed."""
        if self._made is None or self._made[0].rows != self.samplers:
            self._made = Sampler(self.samplers), _rows(self.samplers)
        return self._made


def _drawn(
    sampler: Sampler,
    logits: mx.array,
    inputs: mx.array,
    mask: mx.array | None,
    noise: mx.array | None = None,
) -> Sampled:
    try:
        return sampler(logits, inputs, mask, noise)
    except Exception as error:
        if device_error(error):  # no row caused it
            raise
        return sample_rows_alone(sampler.rows, logits, inputs, mask)


def _sampled_but(
    late: dict[int, SlowMask],
    rows: list[Row],
    logits: mx.array,
    inputs: mx.array,
    mask: mx.array | None,
) -> Sampled:
    """Draws for all rows but the late ones, which keep what their draws need."""
    for at, slow in late.items():
        rows[at].late = LateDraw(logits[at : at + 1], inputs[at : at + 1], slow)
    places = [at for at in range(len(rows)) if at not in late]
    tokens, pending = mx.zeros(len(rows), mx.uint32), [logits, inputs]
    logprobs = dict[int, RowLogprobs | None]()
    if places:
        others = mx.array(places)
        own = None if mask is None else mask[others]
        sampler = Sampler([rows[place] for place in places])
        drawn = _drawn(sampler, logits[others], inputs[others], own)
        tokens[others] = drawn.tokens.astype(mx.uint32)
        logprobs = dict(zip(places, drawn.logprobs, strict=True))
        pending += drawn.pending
    return Sampled(tokens, [logprobs.get(place) for place in range(len(rows))], pending)


class PrefillBatch(PromptProcessingBatch):
    uids: list[int]
    tokens: list[list[int]]
    samplers: list[Row]
    prompt_cache: list[Any]
    logits_processors: list[Any]

    def prompt(self, tokens: list[list[int]]) -> None:
        """Computes the next tokens of each row's prompt."""
        lengths = [len(row) for row in tokens]
        if max(lengths) == 1 and min(lengths) == 0:
            self._prompt_token(tokens, lengths)
        else:
            with using(_rows(self.samplers), self.model):
                super().prompt(tokens)

    def _prompt_token(self, tokens: list[list[int]], lengths: list[int]) -> None:
        """Computes one token for some rows and none for others. They are padded to two tokens: a
        rotating cache treats an input of one token as a decoding step, where no row is padded."""
        for known, row in zip(self.tokens, tokens, strict=True):
            known += row
        for cache in self.prompt_cache:
            cache.prepare(lengths=lengths, right_padding=[2 - length for length in lengths])
        with using(_rows(self.samplers), self.model):
            self.model(mx.array([[*row, 0, 0][:2] for row in tokens]), cache=self.prompt_cache)
        for cache in self.prompt_cache:
            cache.finalize()
        mx.eval([cache.state for cache in self.prompt_cache])

    def decode(self, last_tokens: list[int]) -> DecodeBatch:
        """Returns the same rows as a decoding batch; all but their last tokens are computed."""
        return DecodeBatch(
            self.model,
            self.uids,
            mx.array(last_tokens),
            self.prompt_cache,
            self.tokens,
            self.samplers,
            self.fallback_sampler,
            self.logits_processors,
            self.stop_sequences,
            self.max_tokens,
        )


def _rows(rows: list[Row]) -> RowAdapters:
    return RowAdapters([row.row_adapter for row in rows])
