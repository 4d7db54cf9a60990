"""Arguments that a model wrote as the value of one key: `{"arguments": {"city": "Paris"}}`."""

from collections.abc import Collection, Mapping
from typing import Any

from mlx_server.repair.call_shapes import ARGUMENT_KEYS
from mlx_server.repair.jsonish import loads
from mlx_server.repair.malformed import Malformed

WRAPPERS = frozenset((*ARGUMENT_KEYS, "properties"))
"""Words that call formats and schemas have for the arguments as a whole."""


def unwrapped(key: str, value: Any, known: Collection[str]) -> Mapping[str, Any] | None:
    """The arguments that are the value of `key`; None if it is an argument like any other.

    known: the parameters that the tool's schema names, to which all of the arguments must belong.
    """
    if not known or key in known or key not in WRAPPERS:
        return None
    if isinstance(value, str):
        value = _json_of(value)
    return value if isinstance(value, Mapping) and value.keys() <= set(known) else None


def _json_of(text: str) -> Any:
    try:
        return loads(text) if text.lstrip().startswith("{") else None
    except Malformed:
        return None
