"""The caches of keys and values: what a row's take of memory, and those that mlx-lm does not have,
in 8 or 4 bits, and for models that only ever compute one row at a time.

Only layers that keep all keys and values are quantised. Sliding windows and recurrent states stay
as they are: they do not grow with the conversation.
"""

import json
import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_server.engine.messages import (
    STEP,
    CacheMeasured,
    CommandFailed,
    ComputeDtype,
    KvCost,
    MeasureCache,
)
from mlx_server.errors import message_of, public_message
from mlx_server.models.architectures import is_encoder, texts
from mlx_server.system.files import read_regular
from mlx_server.worker.encoders import encoder_classes
from mlx_server.worker.kernels import has_gpu
from mlx_server.worker.mlx_lm_internals import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    create_attention_mask,
    make_prompt_cache,
)
from mlx_server.worker.ragged_caches import QuantizedRow, leaves
from mlx_server.worker.weights import HALF_PRECISIONS, arrays, model_classes

log = logging.getLogger("mlx_server.engine")


def _mask_of_rows(
    rows: BatchKVCache, N: int, return_array: bool = False, window_size: int | None = None
) -> Any:
    """The mask of a pass of N tokens a row. A row that is alone has no padding, and needs no array:
    kernels then skip what is not seen, and read no mask of N times the context for each head."""
    if len(rows.offset) == 1:
        return create_attention_mask(N, rows._idx, return_array, window_size)
    return _mask_of_padded(rows, N, return_array, window_size=window_size)


_mask_of_padded = BatchKVCache.make_mask
BatchKVCache.make_mask = _mask_of_rows


def set_kv_bits(model: nn.Module, bits: int | None) -> None:
    """Has the model's rows keep their keys and values in so many bits; None: as computed."""
    model.kv_bits = bits


def make_caches(model: nn.Module) -> list[Any]:
    """Returns the empty caches of one row."""
    caches = make_prompt_cache(model)
    bits = getattr(model, "kv_bits", None)
    return [_in_bits(entry, bits) for entry in caches] if bits else caches


def _in_bits(entry: Any, bits: int) -> Any:
    if isinstance(entry, CacheList):
        return CacheList(*(_in_bits(each, bits) for each in entry.caches))
    return QuantizedRow(bits) if type(entry) is KVCache else entry


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
    kind = getattr(model, "model_type", "")
    if reason := UNBATCHABLE.get(kind) or getattr(model, "why_alone", ""):
        return str(reason)
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
    rows = [entry.extract(0) for entry in batch]
    other = [entry.merge([entry]) for entry in rows]
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
            kind = OneChunkedRow if isinstance(entry, ChunkedKVCache) else OneRow
            entry.__class__ = type(type(entry).__name__, (kind, type(entry)), {})
    return entries


SHORT, LONG = 1, 1 + STEP
"""Prompt lengths whose caches differ by one step."""


def cache_cost(
    config: dict[str, Any],
    kv_bits: int | None = None,
    cut: Callable[[nn.Module], None] = lambda model: None,
    compute_dtype: ComputeDtype = "auto",
) -> KvCost:
    """Returns the cost of one row of a model with this config.json. Raises what mlx-lm raises for
    it, and ValueError if its keys and values can't be kept in `kv_bits`. cut: see `WholeModel`."""
    if is_encoder(config):
        if kv_bits:
            raise ValueError("`kv_bits` has no effect: it keeps no keys and values. Leave it out.")
        return _activations_of(encoder_classes(config)[1].from_dict(config))
    model_class, arguments = model_classes(config)
    model = model_class(arguments.from_dict(config)).eval()
    mx.random.seed(0)  # see weights.load
    model.set_dtype(HALF_PRECISIONS.get(compute_dtype) or _activations(config))
    cut(model)
    if kv_bits:
        _check_kv_bits(model, kv_bits)
    try:
        short, long = _caches(model, SHORT), _caches(model, LONG)
    except ValueError as error:
        if "[eval]" not in str(error):
            raise
        return _largest(model)  # DBRX looks at values while it computes
    costs = [_cost(*pair) for pair in zip(short, long, strict=True)]
    return KvCost(
        per_token=sum(cost.per_token for cost in costs),
        windowed_per_token=sum(cost.windowed_per_token for cost in costs),
        window=max((cost.window for cost in costs), default=0),
        fixed=sum(cost.fixed for cost in costs),
    )


def measure_cache(
    command: MeasureCache, cut: Callable[[nn.Module], None]
) -> CacheMeasured | CommandFailed:
    try:
        config = json.loads(read_regular(Path(command.path) / "config.json"))
        cost = cache_cost(config, command.kv_bits, cut, command.compute_dtype)
        return CacheMeasured(command.model, cost)
    except Exception as error:
        log.exception("%s can't be built", command.model)
        return CommandFailed("MeasureCache", command.model, message_of(error), of_files=True)


def _activations_of(arguments: Any) -> KvCost:
    """Returns the activations of one encoder layer for a token: keys, queries, values, the
    attention's output, two residuals and twice the intermediate width. They take float32 at most,
    and are freed after the layer."""
    widths = 6 * arguments.hidden_size + 2 * arguments.intermediate_size
    return KvCost(per_token=4 * widths)


def _check_kv_bits(model: nn.Module, bits: int) -> None:
    set_kv_bits(model, bits)
    try:
        caches = _caches(model, SHORT)
    except Exception as error:
        raise ValueError(f"`kv_bits: {bits}` does not fit it: {error}") from None
    if not any(isinstance(cache, QuantizedKVCache) for cache in caches):
        raise ValueError(
            f"`kv_bits: {bits}` has no effect: it has no layers that keep all keys and "
            "values. Leave it out."
        )


def _activations(config: dict[str, Any]) -> mx.Dtype:
    """Returns the type in which the model computes; half precisions are loaded as float32 without
    a GPU."""
    types = {text.get(key) for text in texts(config) for key in ("dtype", "torch_dtype")}
    return mx.bfloat16 if has_gpu() and "float32" not in types else mx.float32


def _caches(model: nn.Module, tokens: int) -> list[Any]:
    cache = make_caches(model)

    def compute(prompt: mx.array) -> list[mx.array]:
        model(prompt, cache=cache)
        return []

    # While MLX compiles a function it refuses to evaluate anything, which would create the weights.
    mx.compile(compute)(mx.zeros((1, tokens), mx.int32))
    return list(leaves(cache))


DRAFTED_COLUMNS = 176
"""The most columns that a sliding window has besides its own while its row drafts."""


def _cost(short: Any, long: Any) -> KvCost:
    """Returns the cost of one layer, whose cache grows with the tokens, grows up to a window, or
    does not grow at all."""
    if window := getattr(long, "max_size", 0):
        return KvCost(windowed_per_token=long.nbytes // LONG, window=window + DRAFTED_COLUMNS)
    if isinstance(long, ArraysCache):
        return KvCost(fixed=2 * long.nbytes)  # during a pass with drafts, also the states before it
    per_token = -(-(long.nbytes - short.nbytes) // STEP)
    return KvCost(per_token, fixed=max(0, short.nbytes - STEP * per_token))


def _largest(model: nn.Module) -> KvCost:
    """Returns the cost if each layer caches keys and values as wide as the model."""
    widest = max((array for array in arrays(model) if array.ndim == 2), key=lambda a: a.size)
    return KvCost(2 * min(widest.shape) * widest.itemsize * len(make_prompt_cache(model)))
