"""The positions that a pass's matrices and experts compute.

A pass is [rows, tokens], and rows with shorter drafts are padded at the right. Attention and
recurrent states need that shape; matrices get the real positions in one line, and the first one
several times where a kernel for more positions takes less time. So do experts, if they are then
read once for all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.worker.costs import SHARDED
from mlx_server.worker.kernels import SORTED, TILED
from mlx_server.worker.mlx_lm_internals import SwitchGLU


class Packing:
    """That of the present pass: mlx-lm's models hand no argument down to their layers."""

    shape: tuple[int, int] | None = None
    padding = 0
    """The positions that matrices compute twice."""
    real: mx.array
    """The flat places of the real positions."""
    places: mx.array
    """And of the padding's."""
    back: mx.array
    """For each position of the pass, padding included, its place among the real ones."""


@contextmanager
def packed(lengths: Sequence[int], padding: int) -> Iterator[None]:
    """lengths: of each row's input. padding: how many positions to add."""
    longest = max(lengths)
    if padding or min(lengths) < longest:
        real = [row * longest + at for row, length in enumerate(lengths) for at in range(length)]
        ends = [sum(lengths[: row + 1]) for row in range(len(lengths))]
        back = [
            end - length + min(at, length - 1)
            for end, length in zip(ends, lengths, strict=True)
            for at in range(longest)
        ]
        Packing.shape, Packing.padding = (len(lengths), longest), padding
        Packing.real, Packing.back = mx.array(real), mx.array(back)
        Packing.places = mx.array(real + real[:1] * padding)
    try:
        yield
    finally:
        Packing.shape, Packing.padding = None, 0


def _is_pass(x: mx.array) -> bool:
    return x.ndim == 3 and x.shape[:2] == Packing.shape


def _of_positions(
    product: Callable[[Any, mx.array], mx.array],
) -> Callable[[Any, mx.array], mx.array]:
    def call(layer: Any, x: mx.array) -> mx.array:
        if Packing.shape is None or not _is_pass(x):  # most steps pay no second call
            return product(layer, x)
        y = product(layer, x.reshape(-1, x.shape[-1])[Packing.places])
        return mx.unflatten(y[Packing.back], 0, x.shape[:2])

    return call


_experts: Callable[[Any, mx.array, mx.array], mx.array] = SwitchGLU.__call__


def _of_experts(layer: Any, x: mx.array, indices: mx.array) -> mx.array:
    is_packed = Packing.shape is not None and _is_pass(x)
    if type(layer) is not SwitchGLU or not is_packed:  # adapters count the pass's rows
        return _experts(layer, x, indices)
    padded = len(Packing.places) * indices.shape[-1]
    is_tiled = padded >= max(SORTED, TILED * layer.up_proj.num_experts)
    taken = Packing.places if is_tiled else Packing.real
    flat, chosen = (each.reshape(-1, each.shape[-1])[taken] for each in (x, indices))
    return mx.unflatten(_experts(layer, flat, chosen)[Packing.back], 0, x.shape[:2])


for kind in (nn.Linear, nn.QuantizedLinear, *SHARDED):
    kind.__call__ = _of_positions(kind.__call__)  # type: ignore[method-assign, unused-ignore]
for kind in (nn.Embedding, nn.QuantizedEmbedding):
    kind.as_linear = _of_positions(kind.as_linear)  # type: ignore[method-assign, unused-ignore]
SwitchGLU.__call__ = _of_experts  # type: ignore[method-assign, unused-ignore]
