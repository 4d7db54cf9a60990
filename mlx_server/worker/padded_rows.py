"""Rows of zeros that a step's matrices get where a kernel for more rows takes less time.

They are added around each matrix, so that caches, attention and experts have no further rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Padding:
    rows = 0
    """The rows that are added at present: mlx-lm's models hand no argument down to their layers."""


@contextmanager
def padded(rows: int) -> Iterator[None]:
    """Adds so many rows to the products of a model's call, which has one token for each row."""
    before, Padding.rows = Padding.rows, rows
    try:
        yield
    finally:
        Padding.rows = before


_unpadded = nn.QuantizedLinear.__call__


def _call(layer: Any, x: mx.array) -> mx.array:
    is_padded = Padding.rows and x.ndim == 3
    rows = mx.pad(x, [(0, Padding.rows), (0, 0), (0, 0)]) if is_padded else x
    y: mx.array = _unpadded(layer, rows)
    return y[: x.shape[0]] if is_padded else y


nn.QuantizedLinear.__call__ = _call  # type: ignore[method-assign, unused-ignore]
