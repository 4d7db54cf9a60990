"""Log probabilities of tokens: of a step's rows that requested them, and their alternatives."""

import math
from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlx_server.engine.messages import Logprobs
from mlx_server.worker.row import Row

CHUNK = 64
"""Neighbouring values of which at first only the largest is compared with others."""


class LogprobReports:
    """Log probabilities for the rows that requested them; other rows cost nothing."""

    def __init__(self, rows: Sequence[Row]) -> None:
        counts = [(i, row.sampling.logprobs) for i, row in enumerate(rows)]
        wanted = [(i, count) for i, count in counts if count is not None]
        self.at = [i for i, _ in wanted]
        self.places = [(place, count) for place, (_, count) in enumerate(wanted)]
        self.most = max((count for _, count in wanted), default=0)

    def __call__(self, raw: mx.array, tokens: mx.array) -> "StepLogprobs":
        if not self.at:
            return StepLogprobs(None, None, None)
        at = mx.array(self.at)
        return step_logprobs(raw[at], tokens[at], self.most)


def step_logprobs(logits: mx.array, tokens: mx.array, most: int) -> "StepLogprobs":
    """logits: [rows, vocabulary]; tokens: [rows], the chosen ones; most: alternatives per row."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    most = min(most, logits.shape[-1])
    if not most:
        return StepLogprobs(chosen, None, None)
    likeliest = places_of_largest(logprobs, most)
    return StepLogprobs(chosen, likeliest, mx.take_along_axis(logprobs, likeliest, axis=-1))


def places_of_largest(values: mx.array, count: int) -> mx.array:
    """Returns the places of each row's `count` largest values, in no order; of equals, the first.

    Only the chunks with the largest maxima can hold them, so only the values of these are compared
    with each other. To partition or sort a whole vocabulary takes several times as long.
    """
    rows, width = values.shape
    chunks = -(-width // CHUNK)
    if chunks <= count:
        return _partition(values, count)
    if rest := -width % CHUNK:
        values = mx.pad(values, [(0, 0), (0, rest)], constant_values=-math.inf)
    chunked = values.reshape(rows, chunks, CHUNK)
    # In the order of their places: of equal values the first one has to stay the first.
    best = mx.sort(_partition(chunked.max(axis=-1), count), axis=-1)
    held = mx.take_along_axis(chunked, best[:, :, None], axis=1).reshape(rows, count * CHUNK)
    found = _partition(held, count)
    places = mx.take_along_axis(best, found // CHUNK, axis=-1) * CHUNK + found % CHUNK
    return mx.minimum(places, width - 1)  # NaN comes after what was padded


def _partition(values: mx.array, count: int) -> mx.array:
    return mx.argpartition(-values, kth=count - 1, axis=-1)[:, :count]


class StepLogprobs:
    """One step's log probabilities, read back once for all rows that requested them."""

    def __init__(
        self, chosen: mx.array | None, likeliest: mx.array | None, values: mx.array | None
    ) -> None:
        self._chosen, self._likeliest, self._values = chosen, likeliest, values

    def arrays(self) -> list[mx.array]:
        found = (self._chosen, self._likeliest, self._values)
        return [array for array in found if array is not None]

    @cached_property
    def chosen(self) -> list[float]:
        assert self._chosen is not None
        chosen: list[float] = np.array(self._chosen).tolist()
        return chosen

    @cached_property
    def tops(self) -> list[list[tuple[int, float]]]:
        """Each row's alternatives, best first; of equals, the one that greedy decoding takes."""
        if self._likeliest is None or self._values is None:
            return [[] for _ in self.chosen]
        ids, values = np.array(self._likeliest).tolist(), np.array(self._values).tolist()
        return [
            sorted(zip(*row, strict=True), key=lambda top: (-top[1], top[0]))
            for row in zip(ids, values, strict=True)
        ]


class RowLogprobs:
    """One row's part of a step's log probabilities; stays valid when the batch changes."""

    def __init__(self, step: StepLogprobs, place: tuple[int, int]) -> None:
        self._step = step
        self._place, self._count = place

    def read(self) -> Logprobs:
        top = self._step.tops[self._place][: self._count]
        return Logprobs(self._step.chosen[self._place], top)
