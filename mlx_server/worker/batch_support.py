"""Finds out when a model is loaded whether its rows can share a batch, and adapts the caches of
models that only ever compute a batch of one row."""

from copy import deepcopy
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_server.errors import public_message
from mlx_server.worker.mlx_lm_internals import ChunkedKVCache
from mlx_server.worker.quantized_kv import make_caches

UNBATCHABLE = {
    "afm7": "its last layers take the position of a token from the longest row",
    "jamba": "its Mamba layers read what pads the shorter rows",
    "longcat_flash_ngram": "its embeddings read what pads the shorter rows",
    "minimax_m3_vl": "it cuts its blocks of keys where the longest row has them",
    "olmo_hybrid": "its convolutions read what pads the shorter rows",
}
"""The model types that mlx-lm batches without an error but computes wrongly where rows differ in
length, each with the reason. tests/worker/test_architectures.py finds them."""

LENGTHS = [3, 1, 2, 3, 1, 2, 3]
"""The lengths of the rows of the trial. No model has this number of attention heads: a mask that is
applied to heads in place of rows raises an error only if their numbers differ."""


def why_alone(model: nn.Module) -> str:
    """Returns why the rows of this model must be computed one at a time; empty if they can share a
    batch.

    A test batch goes through all operations. Only its graph is built; nothing is computed.
    """
    if reason := UNBATCHABLE.get(getattr(model, "model_type", "")):
        return reason
    caches = [make_caches(model) for _ in LENGTHS]
    if unsupported := sorted({type(c).__name__ for c in caches[0] if not hasattr(c, "merge")}):
        return f"mlx-lm can't batch its {', '.join(unsupported)}"
    try:
        _try_batch(model, caches)
    except Exception as error:
        return f"a batch of several rows fails in mlx-lm ({public_message(error)})"
    return ""


def _try_batch(model: nn.Module, caches: list[list[Any]]) -> None:
    batch = [entries[0].merge(list(entries)) for entries in zip(*caches, strict=True)]
    longest = max(LENGTHS)
    for entry in batch:
        entry.prepare(lengths=LENGTHS, right_padding=[longest - length for length in LENGTHS])
    model(mx.zeros((len(LENGTHS), longest), mx.int32), cache=batch)
    for entry in batch:
        entry.finalize()
    taken = [entry.extract(0) for entry in batch]
    other = [entry.merge([entry]) for entry in taken]
    for entry, more in zip(batch, other, strict=True):
        entry.filter(list(range(1, len(LENGTHS))))
        entry.extend(more)
    model(mx.zeros((len(LENGTHS), 1), mx.int32), cache=batch)


class OneRow:
    """The batch operations for a cache that is never in a batch with another one."""

    @classmethod
    def merge(cls, caches: list[Self]) -> Self:
        (only,) = caches
        return only

    def extend(self, other: Self) -> None:
        raise ValueError("rows of this model can't share a batch")

    def filter(self, keep: list[int]) -> None:
        assert list(keep) == [0]

    def extract(self, index: int) -> Self:
        """Returns a copy, since the row may continue."""
        assert index == 0
        return deepcopy(self)

    def prepare(self, **_: Any) -> None:
        """Does nothing, since one row needs no padding."""

    def finalize(self) -> None:
        """Does nothing, since one row has no padding."""


class OneChunkedRow(OneRow):
    start_position: int

    def is_trimmable(self) -> bool:
        """Whether no tokens were dropped at its front: an earlier chunk would be incomplete."""
        return self.start_position == 0


def one_row(entries: list[Any]) -> list[Any]:
    """Gives one row's cache entries the operations of a batch, in place."""
    for entry in entries:
        if not isinstance(entry, OneRow):
            own = OneChunkedRow if isinstance(entry, ChunkedKVCache) else OneRow
            entry.__class__ = type(type(entry).__name__, (own, type(entry)), {})
    return entries
