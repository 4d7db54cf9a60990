"""Reads JSON that some servers write, although JSON has neither NaN nor half surrogate pairs."""

import json
import math
from typing import Any

import msgspec


def decoded(text: str | bytes) -> Any:
    """The value of JSON, or of what is nearly that. Raises as `lenient_json` does."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return lenient_json(text if isinstance(text, str) else text.decode())


def lenient_json(text: str) -> Any:
    """The value, in which numbers that are none are None.

    Raises ValueError or RecursionError for what is not JSON.
    """
    found = json.loads(text, parse_constant=lambda name: None, parse_float=_finite)
    return _encodable(found)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _encodable(value: Any) -> Any:
    """The value, with whole characters only: some servers cut an emoji in two."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_encodable(each) for each in value]
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case _:
            return value
