"""Parses the JSON values of one event, or of one body that is not streamed."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server.json_bounds import check_bounds, check_numbers
from mlx_server.upstream.lenient_json import decoded, lenient_json
from mlx_server.upstream.sse import END, ENDS

BETWEEN = re.compile(r"[\s,]*(?:data:\s*)?")
"""Matches what may stand between two values of one event."""

PINGS = frozenset(("ping", "pong", "heartbeat", "keepalive", "keep-alive"))
"""Events that only keep the connection open."""

WRAPPERS = ("data", "response", "output", "result", "body")
"""Fields in which some servers wrap the answer."""


def values_of(text: str | bytes) -> Iterator[Any]:
    """Yields the values of a text; `END` stands for the end of the stream. Raises ValueError or
    RecursionError for a text that is not JSON, or has more values than a request may have."""
    raw = text.encode() if isinstance(text, str) else text
    check_bounds(raw)
    check_numbers(raw)
    try:
        found = decoded(raw)
    except (ValueError, RecursionError):
        words = raw.decode().strip()
        if words.lower() not in PINGS:
            yield from _concatenated(words)
        return
    if isinstance(found, list):
        yield from (_unwrapped(each) for each in found if each)
    elif found not in (None, ""):
        yield _unwrapped(found)


def _concatenated(text: str) -> Iterator[Any]:
    """Yields the values of a text that has several, for example one on each line."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        end = next((each for each in ENDS if text.startswith(each, at)), None)
        if end and at:
            yield END
            return
        _, stop = decoder.raw_decode(text, at)
        yield _unwrapped(lenient_json(text[at:stop]))
        found = BETWEEN.match(text, stop)
        at = found.end() if found else stop


def _unwrapped(value: Any) -> Any:
    if not isinstance(value, Mapping) or "choices" in value:
        return value
    for name in WRAPPERS:
        inner = value.get(name)
        if isinstance(inner, Mapping) and "choices" in inner:
            return {"usage": value.get("usage"), **inner}
    return value
