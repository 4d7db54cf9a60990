"""Log probabilities of tokens: of a step's rows that requested them, and their alternatives."""

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlx_server.engine.messages import Logprobs
from mlx_server.worker.row import Row


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
    likeliest = mx.argpartition(-logprobs, kth=most - 1, axis=-1)[:, :most]
    return StepLogprobs(chosen, likeliest, mx.take_along_axis(logprobs, likeliest, axis=-1))


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
