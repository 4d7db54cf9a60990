"""Checks whether arguments fit a tool's schema, where that decides whether there is a call.

Names, types, listed values and required members are checked. Everything else that a schema says
needs a validator, which may run for seconds and is not needed to distinguish a call from other
JSON.
"""

from collections.abc import Mapping
from typing import Any

from mlx_server import limits
from mlx_server.schemas.lenient import member_schemas, parts_of, properties_in, required_by
from mlx_server.schemas.types import resolved, type_of, types_of
from mlx_server.schemas.view import View

Schema = Mapping[str, Any]


def fits(arguments: Mapping[str, Any], schema: Schema) -> bool:
    view = View(schema)
    return _fits_object(arguments, schema, view, limits.COERCED_DEPTH)


def is_made_of(arguments: Mapping[str, Any], schema: Schema) -> bool:
    """Whether the arguments fit, and each of them is one that the schema names."""
    view = View(schema)
    named = {key for part in parts_of(schema, view, ("allOf",)) for key in properties_in(part)}
    return bool(arguments) and arguments.keys() <= named and fits(arguments, schema)


def _fits(value: Any, schema: Schema, view: View, depth: int) -> bool:
    schema = resolved(schema, view)
    if type_of(value) not in types_of(schema, view) or not _is_listed(value, schema):
        return False
    match value:
        case dict() if depth:
            return _fits_object(value, schema, view, depth - 1)
        case list() if depth:
            items = schema.get("items")
            return not isinstance(items, Mapping) or all(
                _fits(item, items, view, depth - 1) for item in value
            )
    return True


def _is_listed(value: Any, schema: Schema) -> bool:
    options = schema.get("enum")
    if isinstance(options, list) and value not in options:
        return False
    return "const" not in schema or bool(schema["const"] == value)


def _fits_object(value: Mapping[str, Any], schema: Schema, view: View, depth: int) -> bool:
    for part in parts_of(schema, view, ("allOf",)):
        if not value.keys() >= set(required_by(part)):
            return False
        properties = properties_in(part)
        closed = part.get("additionalProperties") is False and "patternProperties" not in part
        if closed and not value.keys() <= properties.keys():
            return False
    return all(
        any(_fits(item, option, view, depth) for option in options)
        for key, item in value.items()
        if (options := member_schemas(schema, key, view))
    )
