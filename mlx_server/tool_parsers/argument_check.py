"""What is wrong with the arguments of a finished call, as far as its tool's schema is plain.

Only required arguments and types are checked: this runs in the server's own loop, where a client's
pattern must not run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server import limits
from mlx_server.repair.coerce import types_read
from mlx_server.schemas.types import ALL, listed, resolved, type_of
from mlx_server.schemas.view import View

Schema = Mapping[str, Any]


def argument_errors(arguments: Mapping[str, Any], schema: Schema) -> Iterator[tuple[str, str]]:
    """The name of each argument that is wrong, and what is wrong with it."""
    for key in required(schema):
        if key not in arguments:
            yield key, "it is required"
    for key, value in arguments.items():
        types = types_read(schema, key)
        if types != ALL and _type(value) not in types:
            named = types - {"integer"} if "number" in types else types
            yield key, f"it should be of type {' or '.join(sorted(named))}"


def _type(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else type_of(value)


def required(schema: Schema) -> list[str]:
    """The required arguments in the schema's order. Those that only one of several alternatives
    requires are left out."""
    view, found = View(schema), dict[str, None]()
    waiting, seen = [schema], set[int]()
    while waiting and len(seen) < limits.COERCED_PARTS.value:
        part = resolved(waiting.pop(0), view)
        if id(part) not in seen:
            seen.add(id(part))
            required = part.get("required")
            names = required if isinstance(required, list) else []
            found.update(dict.fromkeys(name for name in names if isinstance(name, str)))
            waiting += listed(part, "allOf")
    return list(found)
