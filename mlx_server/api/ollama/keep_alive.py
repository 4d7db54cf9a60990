"""How long a model stays in memory after a request: a number of seconds, or a duration of Go."""

import math
import re

from mlx_server.errors import BadRequest

PARAM = "keep_alive"
MOST_CHARACTERS = 40
MOST_SECONDS = 1e9

SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
NUMBER = re.compile(r"-?[0-9]+\.?[0-9]*")

KeepAlive = int | float | str


def seconds_of(given: KeepAlive) -> float:
    """Infinite for a negative duration, which means that the model stays until memory is needed."""
    # a whole number may be too large for a float
    found = _parsed(given) if isinstance(given, str) else max(-1, min(given, 2 * MOST_SECONDS))
    return math.inf if found < 0 or found > MOST_SECONDS else found


def _parsed(text: str) -> float:
    if len(text) <= MOST_CHARACTERS:
        if NUMBER.fullmatch(text):
            return float(text)
        duration = text.removeprefix("-")
        if duration and not PART.sub("", duration):
            parts = PART.findall(duration)
            total = sum(float(number) * SECONDS[unit] for number, unit in parts)
            return -total if text.startswith("-") else total
    raise BadRequest(
        f"`{PARAM}` should be a number of seconds or a duration such as 5m or 1h30m; it is "
        f"{text[:MOST_CHARACTERS]!r}.",
        param=PARAM,
    )
