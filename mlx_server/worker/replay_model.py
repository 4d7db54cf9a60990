"""A model without weights: its logits follow forced tokens, whatever its input is.

It runs in the real batch with the real sampler, so that masks, biases, log probabilities and
cancellation act on it as on any model. Each row's position in its forced tokens is kept in a cache
entry, which mlx-lm merges, filters and extends together with the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

CERTAIN = 50.0
"""The logit of the next forced token; every other one has 0."""


@dataclass
class ReplayPosition:
    """One row's forced tokens, which follow its prompt, and its progress through both."""

    forced_tokens: Sequence[int] = (0,)
    prompt: int = 0
    consumed: int = 0

    def following(self, tokens: int) -> list[int]:
        """Returns the forced token after each of the next `tokens` tokens; past the end the last
        one repeats, usually a stop token."""
        last = len(self.forced_tokens) - 1
        begin = self.consumed + 1 - self.prompt
        return [self.forced_tokens[min(max(at, 0), last)] for at in range(begin, begin + tokens)]


class ReplayCache:
    """mlx-lm's cache protocol for rows whose whole state is their position."""

    def __init__(self, rows: list[ReplayPosition] | None = None) -> None:
        self.rows = [ReplayPosition()] if rows is None else rows
        self._lengths: list[int] | None = None

    def advance(self, tokens: int) -> None:
        lengths = self._lengths or [tokens] * len(self.rows)
        for i, row in enumerate(self.rows):
            row.consumed += min(lengths[i], tokens)
            lengths[i] -= min(lengths[i], tokens)

    def prepare(self, *, lengths: list[int] | None = None, **_: Any) -> None:
        """Sets the lengths of the next inputs, which are padded at the right to one length."""
        self._lengths = list(lengths) if lengths else None

    def finalize(self) -> None:
        self._lengths = None

    @classmethod
    def merge(cls, caches: "Sequence[ReplayCache]") -> "ReplayCache":
        return cls([ReplayPosition(**vars(row)) for cache in caches for row in cache.rows])

    def extend(self, other: "ReplayCache") -> None:
        self.rows += other.rows

    def filter(self, keep: Any) -> None:
        self.rows = [self.rows[i] for i in (keep.tolist() if hasattr(keep, "tolist") else keep)]

    def extract(self, index: int) -> "ReplayCache":
        return ReplayCache([ReplayPosition(**vars(self.rows[index]))])

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        self.take_back([tokens] * len(self.rows))
        return tokens

    def take_back(self, counts: Sequence[int]) -> None:
        for row, tokens in zip(self.rows, counts, strict=True):
            row.consumed -= tokens

    def size(self) -> int:
        return max(row.consumed for row in self.rows)

    def empty(self) -> bool:
        return False

    @property
    def state(self) -> list[mx.array]:
        return []

    @property
    def nbytes(self) -> int:
        return 0


class ReplayModel(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def make_cache(self) -> list[ReplayCache]:
        return [ReplayCache()]

    def __call__(self, inputs: mx.array, cache: list[ReplayCache] | None = None) -> mx.array:
        """inputs: [rows, tokens]; returns logits [rows, tokens, vocabulary]."""
        positions = (
            cache[0] if cache else ReplayCache([ReplayPosition() for _ in range(inputs.shape[0])])
        )
        nexts = mx.array([row.following(inputs.shape[1]) for row in positions.rows])
        positions.advance(inputs.shape[1])
        return (mx.arange(self.vocabulary) == nexts[..., None]).astype(mx.float32) * CERTAIN


def force_tokens(cache: list[Any], forced_tokens: Sequence[int], prompt: int) -> None:
    """Makes the one row of a new or fetched cache play `forced_tokens` after `prompt` tokens."""
    (row,) = cache[0].rows
    row.forced_tokens, row.prompt = forced_tokens, prompt
