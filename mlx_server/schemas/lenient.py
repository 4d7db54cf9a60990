"""Reads from a tool's schema what it plainly says of arguments: names, types, and which are
required.

Reading this takes limited time and never fails, unlike a validator, so that it may run in the
server's own loop. Where a schema is unclear, more is allowed.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server import limits
from mlx_server.schemas.types import listed, resolved, types_of
from mlx_server.schemas.view import View

Schema = Mapping[str, Any]

COMBINED = ("allOf", "oneOf", "anyOf")


def parts_of(schema: Schema, view: View, keywords: Sequence[str] = COMBINED) -> list[Schema]:
    """Returns the schema and the schemas that these keywords apply to the same value, each once."""
    found: dict[int, Schema] = {}
    waiting = deque([schema])
    while waiting and len(found) < limits.COERCED_PARTS:
        part = resolved(waiting.popleft(), view)
        if id(part) not in found:
            found[id(part)] = part
            waiting += [inner for key in keywords for inner in listed(part, key)]
    return list(found.values())


def required_by(part: Schema) -> list[str]:
    names = part.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def properties_in(part: Schema) -> Schema:
    found = part.get("properties")
    return found if isinstance(found, Mapping) else {}


def required(schema: Schema) -> list[str]:
    """Returns the required arguments in the schema's order. Those that only one of several
    alternatives requires are left out."""
    parts = parts_of(schema, View(schema), ("allOf",))
    return list(dict.fromkeys(name for part in parts for name in required_by(part)))


def member_schemas(schema: Schema, key: str, view: View) -> list[Schema]:
    """Returns the schemas that the parts of an object's schema have for this key."""
    parts = parts_of(schema, view)
    own = [listed[key] for part in parts if key in (listed := properties_in(part))]
    found = own or [part.get("additionalProperties") for part in parts]
    return [each for each in found if isinstance(each, Mapping)]


def member(schema: Schema, key: str, view: View) -> Schema:
    return _any_of(member_schemas(schema, key, view))


def items(schema: Schema, view: View) -> Schema:
    return _any_of([part.get("items") for part in parts_of(schema, view)])


def types_of_member(schema: Schema, key: str) -> frozenset[str]:
    """Returns the JSON types that the schema allows for this key."""
    view = View(schema)
    return types_of(member(schema, key, view), view)


def _any_of(found: Sequence[Any]) -> Schema:
    """Returns a schema that allows what any of these schemas allows."""
    schemas = [schema for schema in found if isinstance(schema, Mapping)]
    return {"anyOf": schemas} if len(schemas) > 1 else next(iter(schemas), {})
