"""The one JSON value in a text that should have been nothing else."""

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
    """The JSON, and what was mended to have it; None where any of it would have to be guessed.

    Objects and arrays are found among prose or in fences if there is one of them and no bracket
    beside. A slip inside is mended as `jsonish.loads` does, so nothing is added, lost or closed.
    """
    if _is_json(text):
        return text, ()
    begin, end = _brackets(text)
    inside = text[begin:end]
    around: tuple[RepairKind, ...] = ("fences",) if inside != text.strip() else ()
    if _is_json(inside):
        return inside, around
    try:
        return json.dumps(loads(inside), ensure_ascii=False, allow_nan=False), (*around, "json")
    except (Malformed, ValueError):
        return None


def text_around_json(text: str) -> str:
    """What `json_text` leaves out, but for fences and marks of thinking."""
    begin, end = _brackets(text)
    return THINK_DELIMITERS.sub("", text[:begin] + text[end:]).strip()


def _brackets(text: str) -> tuple[int, int]:
    """From the first one to the last."""
    begin = min((at for at in map(text.find, "{[") if at >= 0), default=0)
    return begin, max(begin, *(text.rfind(bracket) + 1 for bracket in "}]"))


def parsed(text: str) -> Any:
    """ValueError if it is no JSON, or an object in it has a key twice."""
    try:
        return loads_exactly(text, _refused)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _is_json(text: str) -> bool:
    try:
        parsed(text[: limits.READ_JSON_CHARACTERS.value + 1])
    except ValueError:
        return False
    return len(text) <= limits.READ_JSON_CHARACTERS.value


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
