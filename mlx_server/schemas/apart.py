"""Whether no value can follow two schemas at once: then `oneOf` of them is `anyOf`."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.schemas.types import named
from mlx_server.schemas.view import Part, Schema, View

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


class DisjointOptions:
    def __init__(self, view: View) -> None:
        self._view = view
        self._looks = 0
        self._known: dict[int, _Facts] = {}

    def all_disjoint(self, options: list[Part]) -> bool:
        return all(
            self._disjoint(one, other, limits.SCHEMA_APART_DEPTH.value)
            for at, one in enumerate(options)
            for other in options[at + 1 :]
        )

    def _disjoint(self, one: Part, other: Part, depth: int) -> bool:
        self._looks += 1
        if depth == 0 or self._looks > limits.SCHEMA_COMPARISONS.value:
            return False
        if one.schema is False or other.schema is False:
            return True
        return (
            self._facts(one.schema).disjoint(self._facts(other.schema))
            or self._split(one, other, depth)
            or self._split(other, one, depth)
            or self._members_disjoint(one, other, depth)
        )

    def _split(self, one: Part, other: Part, depth: int) -> bool:
        """Apart from what it refers to or is made of is apart from it."""
        if isinstance(one.schema, bool):
            return False
        target = self._view.target(one)
        if target and self._disjoint(target, other, depth - 1):
            return True
        if any(self._disjoint(part, other, depth - 1) for part in _listed(one, "allOf")):
            return True
        return any(
            (parts := _listed(one, key))
            and all(self._disjoint(part, other, depth - 1) for part in parts)
            for key in ("anyOf", "oneOf")
        )

    def _members_disjoint(self, one: Part, other: Part, depth: int) -> bool:
        """Both objects, and a member that one of them requires can't be as both say."""
        if not self._facts(one.schema).types & self._facts(other.schema).types <= {"object"}:
            return False
        required = _required(one.schema) | _required(other.schema)
        return any(
            self._disjoint(_member(one, key), _member(other, key), depth - 1) for key in required
        )

    def _facts(self, schema: Schema) -> "_Facts":
        if isinstance(schema, bool):
            return _Facts(_TYPES, None)
        if id(schema) not in self._known:
            self._known[id(schema)] = _facts_of(schema)
        return self._known[id(schema)]


class _Facts(NamedTuple):
    types: frozenset[str]
    values: frozenset[str] | None

    def disjoint(self, other: "_Facts") -> bool:
        if self.types.isdisjoint(other.types):
            return True
        return (
            self.values is not None
            and other.values is not None
            and self.values.isdisjoint(other.values)
        )


def _facts_of(schema: Mapping[str, Any]) -> _Facts:
    types = frozenset("number" if name == "integer" else name for name in named(schema))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None:
        return _Facts(types, None)
    return _Facts(types & set(map(_type_of, values)), frozenset(map(_key, values)))


def _listed(part: Part, key: str) -> list[Part]:
    if isinstance(part.schema, bool):
        return []
    return [
        Part((*part.path, key, str(at)), schema)
        for at, schema in enumerate(part.schema.get(key, ()))
    ]


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _key(value: Any) -> str:
    """Equal for equal values, as 1 and 1.0 are; objects and arrays are not looked into."""
    kind = _type_of(value)
    if kind in ("object", "array"):
        return kind
    return str(float(value) + 0.0) if kind == "number" else json.dumps(value)


def _required(schema: Schema) -> set[str]:
    return set() if isinstance(schema, bool) else set(schema.get("required", ()))


def _member(part: Part, key: str) -> Part:
    schema = part.schema
    if isinstance(schema, bool):
        return Part(part.path, True)
    properties: Mapping[str, Schema] = schema.get("properties", {})
    if key in properties:
        return Part((*part.path, "properties", key), properties[key])
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return Part(part.path, not closed)
