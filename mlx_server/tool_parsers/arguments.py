"""Converts the arguments of a call to the types of its tool's schema, and to JSON text."""

import json
import re
from collections.abc import Mapping
from typing import Any

from mlx_server.repair.allowed import RepairPolicy
from mlx_server.repair.coerce import coerced
from mlx_server.repair.model_json import Malformed

HALVES = re.compile("[\ud800-\udfff]")
"""Matches one half of a surrogate pair."""


def coerce_arguments(
    arguments: Mapping[str, Any], schema: Mapping[str, Any], allowed: RepairPolicy
) -> dict[str, Any]:
    """Converts arguments to the types that the schema asks for, as far as that is allowed."""
    if not allowed.coerce:
        return dict(arguments)
    return {key: coerced(value, schema, key) for key, value in arguments.items()}


def json_of(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        # an infinite number, or endless lists in lists
        raise Malformed("a value that JSON can't express") from None
    # a lone surrogate is not a character: it stays as the model wrote it
    return HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
