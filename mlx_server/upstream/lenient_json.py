"""Parses the invalid JSON of some servers, which has NaN, infinities or lone surrogates."""

import json
import math
from typing import Any

import msgspec


def decoded(text: str | bytes) -> Any:
    """The value of a text, parsed as strict JSON if possible, which is faster. Raises as
    `lenient_json` does."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return lenient_json(text if isinstance(text, str) else text.decode())


def lenient_json(text: str) -> Any:
    """The value, with None in place of NaN and infinite numbers.

    Raises ValueError or RecursionError for a text that is not JSON.
    """
    found = json.loads(text, parse_constant=lambda name: None, parse_float=_finite)
    return _encodable(found)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _encodable(value: Any) -> Any:
    """The value, without lone surrogates, which some servers make by cutting an emoji in two."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_encodable(each) for each in value]
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case _:
            return value
