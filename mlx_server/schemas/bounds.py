"""Bounds of integers beyond 2^53. llguidance reads them as doubles and counts in 64 bits."""

import math
from collections.abc import Mapping
from typing import Any

from mlx_server.schemas.types import named

NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""The keywords that constrain numbers alone."""

EXACT = 2**53
"""Larger integers may equal their neighbours as doubles."""
HIGHEST = 2**63 - 1
LOWEST = -(2**63 - 1024)
"""The smallest double that llguidance can write as a bound."""
_OPEN = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}


def wide_bound(schema: Mapping[str, Any], key: str) -> int | None:
    """Returns a bound of integers far from zero as llguidance reads it exactly; None for any other
    bound.

    It may exclude up to 1,024 integers next to the bound, and includes none beyond it.
    """
    if key not in _OPEN or schema.get(_OPEN[key]) is True or "number" in named(schema):
        return None
    value, outwards = schema[key], 1 if key == "maximum" else -1
    if value * outwards <= EXACT or not -HIGHEST - 1 <= value <= HIGHEST:
        return None
    if value == HIGHEST:
        return HIGHEST
    near = float(value)
    if abs(int(near)) > abs(value):
        near = math.nextafter(near, 0)
    return max(int(near), LOWEST)
