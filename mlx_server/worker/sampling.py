"""Samples the next token of every row of a batch in one pass, which reads nothing back but for a
top_p on a CPU.

Every row draws with its own key, made of its seed and the number of tokens it has drawn, so the
result does not depend on the other rows or on its position in the batch. A token is drawn by adding
Gumbel noise and taking the largest: masked tokens stay at minus infinity and can't win.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import Logprobs
from mlx_server.errors import public_message
from mlx_server.requests import SamplingParams
from mlx_server.worker.constrained_decoding.logit_constraints import (
    MAX_LOGIT_SHIFT,
    AdditiveMask,
    Mask,
)
from mlx_server.worker.constrained_decoding.mask_threads import SlowMask
from mlx_server.worker.row import Row

CHUNK = 64
"""Neighbouring values of which at first only the largest is compared with others."""


class LogprobReports:
    """Log probabilities for the rows that requested them; other rows cost nothing."""

    def __init__(self, rows: Sequence[Row]) -> None:
        counts = [(i, row.sampling.logprobs) for i, row in enumerate(rows)]
        wanted = [(i, count) for i, count in counts if count is not None]
        self.places = {i: (place, count) for place, (i, count) in enumerate(wanted)}
        """The place of each such row among them, and how many alternatives it requested."""
        self.most = max((count for _, count in wanted), default=0)

    def __call__(self, raw: mx.array, tokens: mx.array) -> "StepLogprobs":
        if not self.places:
            return StepLogprobs()
        at = mx.array([*self.places])
        return step_logprobs(raw[at], tokens[at], self.most)


def step_logprobs(logits: mx.array, tokens: mx.array, most: int) -> "StepLogprobs":
    """logits: [rows, vocabulary]; tokens: [rows], the chosen ones; most: alternatives per row."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    if not most:
        return StepLogprobs(chosen)
    likeliest = places_of_largest(logprobs, min(most, logits.shape[-1]))
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
    entries = _partition(held, count)
    places = mx.take_along_axis(best, entries // CHUNK, axis=-1) * CHUNK + entries % CHUNK
    return mx.minimum(places, width - 1)  # NaN comes after what was padded


def _partition(values: mx.array, count: int) -> mx.array:
    return mx.argpartition(-values, kth=count - 1, axis=-1)[:, :count]


class StepLogprobs:
    """One step's log probabilities, read back once for all rows that requested them."""

    def __init__(self, *arrays: mx.array) -> None:
        """Those of the chosen tokens; and the places and values of the likeliest, if there are any
        alternatives."""
        self.arrays = arrays

    @cached_property
    def chosen(self) -> list[float]:
        chosen: list[float] = np.array(self.arrays[0]).tolist()
        return chosen

    @cached_property
    def tops(self) -> list[list[tuple[int, float]]]:
        """Each row's alternatives, best first; of equals, the one that greedy decoding takes."""
        if len(self.arrays) == 1:
            return [[] for _ in self.chosen]
        ids, values = (np.array(array).tolist() for array in self.arrays[1:])
        return [
            sorted(zip(*row, strict=True), key=lambda top: (-top[1], top[0]))
            for row in zip(ids, values, strict=True)
        ]

    def read(self, place: int, count: int) -> Logprobs:
        return Logprobs(self.chosen[place], self.tops[place][:count])


RowLogprobs = Callable[[], Logprobs]
"""Reads one row's part of a step's log probabilities, also when the batch has changed."""


log = logging.getLogger("mlx_server.engine")

MINUS_INFINITY = -math.inf

COLDEST = 1e-5
"""A temperature below this counts as 0: scores divided by it leave float32 or its precision."""

LEAST_MASS = 1e-6
"""A top_p below this means the likeliest token, but could be 0 in float32, which means nothing."""

FEW = 256
"""A top_k up to this is found without sorting the vocabulary."""

LEAST_NOISE = -4.0
"""A bound below the Gumbel noise of the smallest positive uniform."""

NOT_NUMBERS = "the model computed invalid scores (NaN or infinity) for its next token"


class Sampled:
    """The tokens of a step, not yet computed: evaluate `pending`, then read them."""

    def __init__(
        self, tokens: mx.array, logprobs: list[RowLogprobs | None], pending: list[mx.array]
    ) -> None:
        self.tokens = tokens
        self.logprobs = logprobs
        self.pending = [tokens, *pending]


class Sampler:
    """Samples for a fixed list of rows; a batch whose rows change needs a new one."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._biases = _Biases(rows)
        self._penalties = _Penalties(rows)
        self._masks = _Masks(rows)
        self._draws = _Draws(rows)
        self._reports = LogprobReports(rows)

    @property
    def constrained(self) -> bool:
        return self._masks.any

    def noise(self, width: int) -> mx.array | None:
        """Returns the noise of the next draws, which needs no logits; None if nothing is drawn."""
        return self._draws.noise(width) if self._draws.rows else None

    def mask(self, inputs: mx.array, width: int) -> Mask | None:
        """Returns the mask of the constrained rows, [rows, width], or None if nothing is masked.
        Waits until the inputs are computed. Rows whose masks take too long are `late` then."""
        ids = cast(list[int], inputs.tolist())
        drawn = [id if row.sampled else None for id, row in zip(ids, self.rows, strict=True)]
        return self._masks.mask.step(drawn, width)

    @property
    def late(self) -> dict[int, SlowMask]:
        """The places of the rows that can't draw in this step, and their masks, which are not made
        yet."""
        return self._masks.mask.late

    def __call__(
        self,
        logits: mx.array,
        inputs: mx.array,
        mask: Mask | None = None,
        noise: mx.array | None = None,
    ) -> Sampled:
        """logits: [rows, vocabulary]; inputs: [rows], the tokens that they follow. noise: that of
        these draws, if it was asked for before."""
        raw = logits.astype(mx.float32)
        logits = self._biases(raw)
        logits = self._penalties(logits, inputs)
        if mask is not None:
            logits = self._masks(logits, mask)
        tokens = self._draws(logits, noise)
        reported = self._reports(raw, tokens)
        faults = _Faults(raw)
        # Rows change only after all went well: otherwise their draws could not be repeated.
        self._penalties.keep()
        for position, row in enumerate(self.rows):
            row.sampled += 1
            row.fault = partial(faults.of, position)
        readers = {i: partial(reported.read, *at) for i, at in self._reports.places.items()}
        return Sampled(
            tokens,
            [readers.get(i) for i in range(len(self.rows))],
            [faults.fine, *self._penalties.state(), *reported.arrays],
        )


def sample_rows_alone(
    rows: Sequence[Row], logits: mx.array, inputs: mx.array, mask: Mask | None = None
) -> Sampled:
    """Samples each row by itself after a Sampler of all rows raised: only the faulty row fails."""
    each = []
    for at, row in enumerate(rows):
        row_mask = None if mask is None else mask[at : at + 1]
        each.append(_sampled_alone(row, logits[at : at + 1], inputs[at : at + 1], row_mask))
    return Sampled(
        mx.concatenate([sampled.tokens for sampled in each]),
        [entry for sampled in each for entry in sampled.logprobs],
        [array for sampled in each for array in sampled.pending],
    )


def _sampled_alone(row: Row, logits: mx.array, inputs: mx.array, mask: Mask | None) -> Sampled:
    try:
        return Sampler([row])(logits, inputs, mask)
    except Exception as error:
        if device_error(error):  # the row did not cause it
            raise
        log.warning("the next token of row %d could not be sampled", row.number, exc_info=True)
        message = f"its next token could not be chosen: {public_message(error)}"
        row.fault = lambda: message
        return Sampled(mx.zeros(1, mx.uint32), [None], [])


class _Faults:
    """The rows of a step that had valid logits, read back once for all rows."""

    def __init__(self, raw: mx.array) -> None:
        # A NaN or an infinity shows in the sum. Minus infinity is valid: it excludes a token.
        self.fine = mx.sum(raw, axis=-1) < math.inf

    @cached_property
    def _fine(self) -> list[bool]:
        fine: list[bool] = np.array(self.fine).tolist()
        return fine

    def of(self, position: int) -> str | None:
        return None if self._fine[position] else NOT_NUMBERS


class _Biases:
    def __init__(self, rows: Sequence[Row]) -> None:
        entries = [(i, t, b) for i, r in enumerate(rows) for t, b in r.sampling.logit_bias.items()]
        self.any = bool(entries)
        if self.any:
            at, tokens, values = zip(*entries, strict=True)
            self.at, self.tokens, self.values = mx.array(at), mx.array(tokens), mx.array(values)

    def __call__(self, logits: mx.array) -> mx.array:
        return logits.at[self.at, self.tokens].add(self.values) if self.any else logits


class _Penalties:
    def __init__(self, rows: Sequence[Row]) -> None:
        self.at = [i for i, row in enumerate(rows) if row.penalised]
        self.rows = [rows[i] for i in self.at]
        self.counts = self.seen = mx.zeros(0)
        if self.rows:
            self.is_all = len(self.rows) == len(rows)
            params = [row.sampling for row in self.rows]
            # each is a pass over all logits, or several
            self.repeats = any(s.repetition_penalty != 1 for s in params)
            self.adds = any(s.presence_penalty or s.frequency_penalty for s in params)
            self.rewards = any(s.repetition_penalty < 1 for s in params)
            self.repetition = _column(self.rows, lambda s: s.repetition_penalty)
            self.presence = _column(self.rows, lambda s: s.presence_penalty)
            self.frequency = _column(self.rows, lambda s: s.frequency_penalty)

    def __call__(self, logits: mx.array, inputs: mx.array) -> mx.array:
        if not self.rows:
            return logits
        at = mx.array(self.at)
        scores = logits if self.is_all else logits[at]
        places = mx.arange(len(self.rows)), inputs[at]
        if self.repeats:
            if not all(row.seen[0] is self.seen for row in self.rows):  # others drew since
                self.seen = _stacked([row.seen for row in self.rows])
            self.seen = mx.array(self.seen)
            self.seen[places] = True
            both = scores / self.repetition, scores * self.repetition
            repeated = mx.minimum(*both)  # of negative scores the product
            if self.rewards:
                raised = mx.maximum(*both)
                repeated = mx.where(self.repetition < 1, raised, repeated)
            scores = mx.where(self.seen, repeated, scores)
        if self.adds:
            if not all(row.counts[0] is self.counts for row in self.rows):
                self.counts = _stacked([row.counts for row in self.rows])
            # the first input belongs to the prompt
            generated = mx.array([float(row.sampled > 0) for row in self.rows])
            self.counts = self.counts.at[places].add(generated)
            scores = scores - self.frequency * self.counts - self.presence * (self.counts > 0)
        return scores if self.is_all else _replaced(logits, at, scores)

    def keep(self) -> None:
        for i, row in enumerate(self.rows):
            row.seen = (self.seen, i) if self.repeats else row.seen
            row.counts = (self.counts, i) if self.adds else row.counts

    def state(self) -> list[mx.array]:
        return [self.seen, self.counts] if self.rows else []


def _stacked(places: Sequence[tuple[mx.array, int]]) -> mx.array:
    return mx.stack([array[at] for array, at in places])


class _Masks:
    def __init__(self, rows: Sequence[Row]) -> None:
        self.any = any(row.constraint for row in rows)
        self.mask = AdditiveMask([row.constraint for row in rows])
        pushed = [
            bool(row.constraint and (row.penalised or row.sampling.logit_bias)) for row in rows
        ]
        self.least = None
        if any(pushed):
            self.least = mx.array([[-MAX_LOGIT_SHIFT if row else MINUS_INFINITY] for row in pushed])

    def __call__(self, logits: mx.array, mask: Mask) -> mx.array:
        allowed = logits if self.least is None else mx.maximum(logits, self.least)
        return mx.minimum(allowed, mx.array(mask))


class _Draws:
    def __init__(self, rows: Sequence[Row]) -> None:
        self.count = len(rows)
        self.at = [i for i, row in enumerate(rows) if row.sampling.temperature >= COLDEST]
        self.rows = [rows[i] for i in self.at]
        if not self.rows:
            return
        params = [row.sampling for row in self.rows]
        self.temperature = _column(self.rows, lambda s: s.temperature)
        narrowed = [i for i, s in enumerate(params) if s.top_k > 0 or s.top_p < 1.0]
        few = [i for i in narrowed if 0 < params[i].top_k <= FEW]
        many = [i for i in narrowed if i not in few]
        self.narrowed = [_Narrowed(self.rows, at) for at in (few, many) if at]
        self.floored = any(s.min_p > 0 for s in params)
        if self.floored:
            self.floor = _column(
                self.rows, lambda s: math.log(s.min_p) if s.min_p else MINUS_INFINITY
            )

    def noise(self, width: int) -> mx.array:
        return _noise(mx.array([row.key() for row in self.rows], mx.uint32), width)

    def __call__(self, logits: mx.array, noise: mx.array | None) -> mx.array:
        if not self.rows:
            return mx.argmax(logits, axis=-1)
        if noise is None:
            noise = self.noise(logits.shape[-1])
        if len(self.rows) == self.count:
            return self._drawn(logits, noise)
        at = mx.array(self.at)
        return _replaced(mx.argmax(logits, axis=-1), at, self._drawn(logits[at], noise))

    def _drawn(self, logits: mx.array, noise: mx.array) -> mx.array:
        scores = logits / self.temperature
        for narrowed in self.narrowed:
            scores = narrowed(scores)
        if self.floored:
            likeliest = mx.max(scores, axis=-1, keepdims=True)
            scores = mx.where(scores < likeliest + self.floor, MINUS_INFINITY, scores)
        return mx.argmax(scores + noise, axis=-1)


class _Narrowed:
    """Rows that a top_k or top_p narrows. All of them have a small top_k, or none has: a sort of
    the whole vocabulary takes longer than all else."""

    def __init__(self, rows: Sequence[Row], at: list[int]) -> None:
        narrowed = [rows[i] for i in at]
        self.at = mx.array(at)
        self.is_all = len(at) == len(rows)
        self.top_k = _column(narrowed, lambda s: s.top_k or math.inf)
        self.top_p = _column(narrowed, lambda s: max(s.top_p, LEAST_MASS))
        most = max(row.sampling.top_k or FEW + 1 for row in narrowed)
        self.most = most if most <= FEW else None

    def __call__(self, scores: mx.array) -> mx.array:
        row_scores = scores if self.is_all else scores[self.at]
        best = None if self.most is None else largest(row_scores, self.most)
        narrowed = narrow(row_scores, self.top_k, self.top_p, best)
        return narrowed if self.is_all else _replaced(scores, self.at, narrowed)


def narrow(
    scores: mx.array, top_k: mx.array, top_p: mx.array, best: mx.array | None = None
) -> mx.array:
    """Keeps each row's `top_k` best, and of those the fewest whose mass reaches `top_p`.

    scores: [rows, vocabulary]; top_k and top_p: [rows, 1]; best: the scores of each row that may be
    the last one kept, as many as the largest top_k. Ties with the last one kept are kept.
    """
    best_first = _best_first(scores if best is None else best)
    allowed = mx.arange(best_first.shape[-1]) < top_k
    mass = mx.softmax(mx.where(allowed, best_first, MINUS_INFINITY), axis=-1)
    reached = mx.cumsum(mass, axis=-1, inclusive=False)
    # The rounded sum reaches 1 too early, but a top_p of 1 must cut nothing.
    stays = allowed & ((reached < top_p) | (top_p >= 1))
    worst = mx.take_along_axis(best_first, stays.sum(axis=-1, keepdims=True) - 1, axis=-1)
    return mx.where(scores < worst, MINUS_INFINITY, scores)


def _best_first(scores: mx.array) -> mx.array:
    """Sorts each row's scores. On a CPU, NumPy sorts a vocabulary in a tenth of MLX's time."""
    if mx.default_device() == mx.cpu and scores.shape[-1] > FEW:
        return mx.array(-np.sort(-np.array(scores), axis=-1))
    return -mx.sort(-scores, axis=-1)


def largest(scores: mx.array, most: int) -> mx.array:
    """Returns each row's largest scores, in no order."""
    places = places_of_largest(scores, min(most, scores.shape[-1]))
    return mx.take_along_axis(scores, places, axis=-1)


def _column(rows: Sequence[Row], field: Callable[[SamplingParams], float]) -> mx.array:
    return mx.array([[float(field(row.sampling))] for row in rows])


def _replaced(whole: mx.array, at: mx.array, part: mx.array) -> mx.array:
    result = mx.array(whole)
    result[at] = part
    return result


def _noise(keys: mx.array, width: int) -> mx.array:
    def row(key: mx.array) -> mx.array:
        return mx.random.gumbel((width,), key=key)

    # A uniform of zero gives minus infinity, which would make the token look masked.
    return mx.maximum(mx.vmap(row)(keys), LEAST_NOISE)
