"""The memory of the device: what a row's caches will take of it, its limit, and what MLX frees."""

import ctypes
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.engine.messages import (
    STEP,
    CacheMeasured,
    CacheNotMeasured,
    ComputeDtype,
    KvCost,
    MeasureCache,
)
from mlx_server.errors import message_of
from mlx_server.models.architectures import is_encoder, texts
from mlx_server.system.files import read_regular
from mlx_server.worker.device import has_gpu
from mlx_server.worker.encoders import encoder_classes
from mlx_server.worker.kv_caches import make_caches, set_kv_bits
from mlx_server.worker.mlx_lm_internals import (
    ArraysCache,
    CacheList,
    QuantizedKVCache,
    make_prompt_cache,
)
from mlx_server.worker.weights import HALF_PRECISIONS, arrays, model_classes

log = logging.getLogger("mlx_server.engine")

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
) -> CacheMeasured | CacheNotMeasured:
    try:
        config = json.loads(read_regular(Path(command.path) / "config.json"))
        cost = cache_cost(config, command.kv_bits, cut, command.compute_dtype)
        return CacheMeasured(command.model, cost)
    except Exception as error:
        log.exception("%s can't be built", command.model)
        return CacheNotMeasured(command.model, message_of(error))


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
    return list(_leaves(cache))


def _leaves(cache: Any) -> Iterator[Any]:
    for each in cache:
        yield from _leaves(each.caches) if isinstance(each, CacheList) else (each,)


DRAFTED_COLUMNS = 144
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


MOST_FREED, FREED_SHARE = 32 << 20, 0.01
"""Bounds on the freed buffers that MLX keeps on a CPU, where they do not count against its memory
limit: MLX's own default in bytes, and a share of the limit."""


def limit_memory(max_bytes: int) -> None:
    mx.set_memory_limit(max_bytes)
    if not has_gpu():  # on a GPU, the limit includes freed buffers
        mx.set_cache_limit(min(MOST_FREED, int(FREED_SHARE * max_bytes)))


def release_memory() -> None:
    """Returns the memory of unloaded weights to the system, instead of keeping it for reuse."""
    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


EVERY_STEPS = 256
"""Decoding steps after which buffers are freed: KV caches grow in pieces of as many tokens."""

FLOOR_BYTES = 256 << 20
"""Fewer bytes than this are not worth freeing."""

SHARE = 0.1
"""The share of the memory limit above which buffers are freed earlier."""

LEAST_STEPS = 16
"""The fewest decoding steps between two times that buffers are freed, even if the steps themselves
use more than the share."""


@dataclass
class Buffers:
    """Decides when MLX frees the buffers that it keeps for reuse.

    A KV cache grows by allocating a larger buffer. The old one has a size that is not needed again,
    so such buffers pile up while rows decode. The buffers of a step itself are reused by the next
    one: freeing them too often makes each step get new memory from the system, zeroed page by page.
    """

    limit: int
    """MLX's memory limit in bytes."""
    _steps: int = 0
    """Decoding steps since buffers were freed."""

    def should_free(self, held: int, *, prefilling: bool) -> bool:
        """Whether to free the buffers; call it once after each step.

        held: bytes kept for reuse. prefilling: whether the next piece of a prompt will reuse them.
        """
        if prefilling:
            return False
        self._steps += 1
        if held <= FLOOR_BYTES:
            return False
        often = self._steps >= LEAST_STEPS and held > SHARE * self.limit
        if often or self._steps >= EVERY_STEPS:
            self._steps = 0
            return True
        return False
