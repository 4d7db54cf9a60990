"""Reads a model's JSON without losing anything silently."""

import json
from collections.abc import Callable
from typing import Any, Self

from mlx_server import limits
from mlx_server.json_bounds import check_bounds

MOST_VALUES = limits.JSON_NODES


class ExactFloat(float):
    """A float that keeps its text, which may carry more: 3.10 can also be a version."""

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number


def loads_exactly(text: str, constant: Callable[[str], Any] | None = None) -> Any:
    """As `json.loads`, but a duplicate key is a ValueError because its value is ambiguous.

    constant: converts NaN and the infinities.
    """
    return json.loads(
        bounded(text),
        parse_float=ExactFloat,
        parse_constant=constant,
        object_pairs_hook=_each_key_once,
    )


def bounded(text: str) -> str:
    """The text. Raises ValueError if it has more lists and objects than a request may have, since
    the interpreter would be held while they are parsed."""
    if len(text) > MOST_VALUES:
        check_bounds(text.encode("utf-8", "surrogatepass"), MOST_VALUES)
    return text


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found
