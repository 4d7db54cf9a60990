"""A forward pass that computes nothing and takes the time of another one."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from bench_parts.simulated.roofline import Machine, Model, seconds

TOKEN = 100
"""What is always said."""


def forward(
    shape: tuple[int, int],
    cache: Any,
    vocabulary: int,
    machine: Machine,
    model: Model,
    take: Callable[[float], None],
) -> mx.array:
    """The logits. The cache grows as it would; without one nothing is taken."""
    rows, tokens = shape
    if cache:
        context = _length(cache[0]) + tokens
        for entry in cache:
            entry.update_and_fetch(mx.zeros((rows, 1, tokens, 1)), mx.zeros((rows, 1, tokens, 1)))
        take(seconds(machine, model, tokens, [context] * rows))
    return mx.broadcast_to(_logits(vocabulary), (rows, tokens, vocabulary))


def _length(cache: Any) -> int:
    padded = getattr(cache, "_idx", None)
    return int(cache.offset if padded is None else padded)


_made: dict[int, mx.array] = {}


def _logits(vocabulary: int) -> mx.array:
    if vocabulary not in _made:
        _made[vocabulary] = mx.where(mx.arange(vocabulary) == TOKEN, 20.0, 0.0)
        mx.eval(_made[vocabulary])
    return _made[vocabulary]
