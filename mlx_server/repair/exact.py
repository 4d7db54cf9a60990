"""JSON as a model wrote it, read so that nothing of it is lost without a word."""

import json
from collections.abc import Callable
from typing import Any, Self


class ExactFloat(float):
    """A number that keeps its text, which may say more: 3.10 is also a version."""

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number


def loads_exactly(text: str, constant: Callable[[str], Any] | None = None) -> Any:
    """As `json.loads`; a key given twice is a ValueError, as nobody knows which value was meant.
    constant: what becomes of NaN and the infinite."""
    return json.loads(
        text, parse_float=ExactFloat, parse_constant=constant, object_pairs_hook=_each_key_once
    )


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found
