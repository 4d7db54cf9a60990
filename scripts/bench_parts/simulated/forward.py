"""A forward pass that computes nothing, but takes the time that a simulated one would take."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from bench_parts.simulated.roofline import Machine, Model, seconds
from mlx_server.worker.forward_pass import Ends, Packing

TOKEN = 100
"""The token that is always generated."""


def forward(
    shape: tuple[int, int],
    cache: Any,
    vocabulary: int,
    machine: Machine,
    model: Model,
    take: Callable[[float], None],
) -> mx.array:
    """Returns the logits. The cache grows as in a real pass; without a cache the pass takes no
    time."""
    rows, tokens = shape
    if cache:
        context = _length(cache[0]) + tokens
        for entry in cache:
            entry.update_and_fetch(mx.zeros((rows, 1, tokens, 1)), mx.zeros((rows, 1, tokens, 1)))
        took = seconds(machine, model, tokens, [context] * rows, Packing.padding)
        # the last layer computes keys and values only, unless logits are wanted
        take(took + took / model.layers if Ends.heads else took)
    wanted = 1 if Ends.heads else tokens
    return mx.broadcast_to(_logits(vocabulary), (rows, wanted, vocabulary))


def _length(cache: Any) -> int:
    padded = getattr(cache, "_idx", None)
    return int(cache.offset if padded is None else padded)


_made: dict[int, mx.array] = {}


def _logits(vocabulary: int) -> mx.array:
    if vocabulary not in _made:
        _made[vocabulary] = mx.where(mx.arange(vocabulary) == TOKEN, 20.0, 0.0)
        mx.eval(_made[vocabulary])
    return _made[vocabulary]
