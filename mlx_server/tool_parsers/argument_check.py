"""Finds what is wrong with the arguments of a finished call.

Only required arguments and types are checked: this runs in the server's own loop, where a client's
pattern must not run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server.schemas.lenient import required, types_of_member
from mlx_server.schemas.types import ALL, type_of

Schema = Mapping[str, Any]


def argument_errors(arguments: Mapping[str, Any], schema: Schema) -> Iterator[tuple[str, str]]:
    """Yields the name of each wrong argument, and what is wrong with it."""
    for key in required(schema):
        if key not in arguments:
            yield key, "it is required"
    for key, value in arguments.items():
        types = types_of_member(schema, key)
        if types != ALL and _type(value) not in types:
            named = types - {"integer"} if "number" in types else types
            yield key, f"it should be of type {' or '.join(sorted(named))}"


def _type(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else type_of(value)
