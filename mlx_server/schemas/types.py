"""The JSON types that a schema allows."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server import limits
from mlx_server.schemas.view import View

ALL = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})

ALIASES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
"""Python's names of types, which tools made from signatures have by mistake."""


def type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def named(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types in the schema's own `type`, where every integer is a number; all types if
    it has none."""
    said = schema.get("type")
    names = said if isinstance(said, list) else [said]
    types = frozenset(name for name in names if isinstance(name, str)) & ALL
    return (types | {"integer"} if "number" in types else types) or ALL


def _alias(said: Any) -> Any:
    return ALIASES.get(said, said) if isinstance(said, str) else said


def types_of(schema: Mapping[str, Any], view: View) -> frozenset[str]:
    """Returns the types that a schema, a part of `view`, allows by itself and through its
    references."""
    return _Types(view).of(schema, limits.COERCED_DEPTH)


def resolved(schema: Mapping[str, Any], view: View) -> Mapping[str, Any]:
    """Returns the schema at the end of its references; an empty one if they lead nowhere."""
    for _ in range(limits.COERCED_DEPTH):
        if not isinstance(schema.get("$ref"), str):
            return schema
        found = view.referred(schema)
        if not isinstance(found, Mapping):
            return {}
        schema = found
    return {}


def listed(schema: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Returns the schemas of `allOf`, `anyOf` or `oneOf`, up to the limit."""
    options = schema.get(key)
    some = options[: limits.COERCED_PARTS] if isinstance(options, list) else []
    return [option if isinstance(option, Mapping) else {} for option in some]


class _Types:
    def __init__(self, view: View) -> None:
        self._view = view
        self._known: dict[int, frozenset[str]] = {}

    def of(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        schema = resolved(schema, self._view)
        if not depth or len(self._known) > limits.COERCED_PARTS:
            return ALL
        if id(schema) not in self._known:
            types = self._known[id(schema)] = ALL  # a schema that refers to itself adds nothing
            for allowed in self._constraints(schema, depth - 1):
                types &= allowed
            self._known[id(schema)] = types or ALL
        return self._known[id(schema)]

    def _constraints(self, schema: Mapping[str, Any], depth: int) -> Iterator[frozenset[str]]:
        yield named({"type": _alias(schema.get("type"))})
        for key in ("anyOf", "oneOf"):
            if options := listed(schema, key):
                yield frozenset().union(*(self.of(option, depth) for option in options))
        for part in listed(schema, "allOf"):
            yield self.of(part, depth)
        values = schema.get("enum")
        if isinstance(values, list) and values:
            yield frozenset(map(type_of, values))
        if "const" in schema:
            yield frozenset({type_of(schema["const"])})
