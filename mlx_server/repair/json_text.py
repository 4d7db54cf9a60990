"""Extracts the JSON value from a text that should consist of it alone."""

import json
import re
from typing import Any

from mlx_server import limits
from mlx_server.events import RepairKind
from mlx_server.repair.exact import loads_exactly
from mlx_server.repair.jsonish import loads
from mlx_server.repair.malformed import Malformed

THINK_DELIMITERS = re.compile(r"```\w*|</?think>")


def json_text(text: str) -> tuple[str, tuple[RepairKind, ...]] | None:
    """Returns the JSON and its repairs; None if any of it would have to be guessed.

    A single object or array is found in prose or code fences, if there are no other brackets. A
    mistake inside is repaired by `jsonish.loads`, so nothing is added, lost or closed.
    """
    if _is_json(text):
        return text, ()
    begin, end = json_range(text)
    inside = text[begin:end]
    around: tuple[RepairKind, ...] = ("fences",) if inside != text.strip() else ()
    if _is_json(inside):
        return inside, around
    try:
        return json.dumps(loads(inside), ensure_ascii=False, allow_nan=False), (*around, "json")
    except (Malformed, ValueError):
        return None


def text_around_json(text: str) -> str:
    """The text that `json_text` leaves out, without code fences and think tags."""
    begin, end = json_range(text)
    return THINK_DELIMITERS.sub("", text[:begin] + text[end:]).strip()


def json_range(text: str) -> tuple[int, int]:
    """The range from the first opening to the last closing bracket."""
    begin = min((at for at in map(text.find, "{[") if at >= 0), default=0)
    return begin, max(begin, *(text.rfind(bracket) + 1 for bracket in "}]"))


def parsed(text: str) -> Any:
    """Parses JSON. Raises ValueError if it is invalid or an object has a duplicate key."""
    try:
        return loads_exactly(text, _refused)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _is_json(text: str) -> bool:
    try:
        parsed(text[: limits.READ_JSON_CHARACTERS + 1])
    except ValueError:
        return False
    return len(text) <= limits.READ_JSON_CHARACTERS


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
