"""Finds out how much memory the caches of a model will take, before its weights are read.

The model is built from config.json and given two prompts, but no value is ever computed: MLX knows
the shapes of arrays that it has not evaluated, and these take no memory.
"""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.checkpoints.architectures import texts
from mlx_server.checkpoints.encoders import is_encoder
from mlx_server.engine.kv_cost import STEP, KvCost
from mlx_server.engine.messages import CacheMeasured, CacheNotMeasured, MeasureCache
from mlx_server.errors import message_of
from mlx_server.worker.encoders import encoder_classes
from mlx_server.worker.mlx_lm_internals import CacheList, QuantizedKVCache, make_prompt_cache
from mlx_server.worker.quantized_kv import make_caches, set_kv_bits
from mlx_server.worker.weights import arrays, model_classes

log = logging.getLogger("mlx_server.engine")

SHORT, LONG = 1, 1 + STEP
"""Prompt lengths whose caches differ by one step."""


def cache_cost(
    config: dict[str, Any],
    kv_bits: int | None = None,
    cut: Callable[[nn.Module], None] = lambda model: None,
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
    model.set_dtype(_activations(config))
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
        config = json.loads((Path(command.path) / "config.json").read_text("utf-8"))
        return CacheMeasured(command.model, cache_cost(config, command.kv_bits, cut))
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
    Metal."""
    types = {text.get(key) for text in texts(config) for key in ("dtype", "torch_dtype")}
    return mx.bfloat16 if mx.metal.is_available() and "float32" not in types else mx.float32


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


def _cost(short: Any, long: Any) -> KvCost:
    """Returns the cost of one layer, whose cache grows with the tokens, grows up to a window, or
    does not grow at all."""
    if window := getattr(long, "max_size", 0):
        return KvCost(windowed_per_token=long.nbytes // LONG, window=window)
    per_token = -(-(long.nbytes - short.nbytes) // STEP)
    return KvCost(per_token, fixed=max(0, short.nbytes - STEP * per_token))


def _largest(model: nn.Module) -> KvCost:
    """Returns the cost if each layer caches keys and values as wide as the model."""
    widest = max((array for array in arrays(model) if array.ndim == 2), key=lambda a: a.size)
    return KvCost(2 * min(widest.shape) * widest.itemsize * len(make_prompt_cache(model)))
