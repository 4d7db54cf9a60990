"""The members of an object's schema, for call formats that write arguments one by one."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server.schemas.view import (
    DEFINITIONS,
    Part,
    Path,
    Schema,
    View,
    reference,
    subschemas_of,
)

_NAMES = ("$schema", "$id", "$anchor", "$dynamicAnchor", *DEFINITIONS)


_SAYS_MORE = frozenset(
    (
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if"),
        *("dependentRequired", "dependentSchemas", "dependencies", "minProperties"),
    )
)
"""Keywords that constrain the members of an object in addition to their list."""


def properties_of(schema: Schema) -> Mapping[str, Schema]:
    """Returns the properties that the schema lists, itself or through its `$ref` and `allOf`."""
    found: dict[str, Schema] = {}
    for part in flattened(Part((), schema), View(schema)):
        if isinstance(part.schema, Mapping):
            for key, inner in part.schema.get("properties", {}).items():
                found.setdefault(key, inner)
    return found


def lists_properties(schema: Mapping[str, Any]) -> bool:
    """Whether the schema itself lists any property."""
    return bool(schema.get("properties"))


def required_of(schema: Schema) -> frozenset[str]:
    return frozenset(
        name
        for part in flattened(Part((), schema), View(schema))
        if isinstance(part.schema, Mapping)
        for name in part.schema.get("required", ())
    )


def members(view: View, key: str) -> list[Part]:
    """Returns all the schemas that constrain one member."""
    parts = flattened(Part((), view.root), view)
    return [found for part in parts if (found := _member(part, key))]


def is_forbidden(view: View, key: str) -> bool:
    return any(part.schema is False for part in members(view, key))


def member(schema: Schema, key: str) -> Mapping[str, Any]:
    """Returns the schema of one member as a root of its own, with everything that it refers to.

    A name that is not listed has the schema of `additionalProperties`, unless the object has
    `patternProperties`: matching a client's pattern here could take for ever.
    """
    view = View(schema)
    found = [part for part in members(view, key) if part.schema is not True]
    carried = _CopiedDefinitions(view)
    own = [carried.copy(_followed(part, view)) for part in found]
    root = own[0] if len(own) == 1 else {"allOf": own} if own else {}
    definitions = carried.definitions()
    return {**root, "$defs": definitions} if definitions else root


def object_of(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments, as an object.

    If it lists properties and says nothing else about members, it allows no others: a small model
    would invent some.
    """
    if parameters is None:
        return {"type": "object"}
    closed = {"additionalProperties": False} if _lists_all(parameters) else {}
    return {"type": "object", **parameters, **closed}


def _lists_all(parameters: Mapping[str, Any]) -> bool:
    listed, required = parameters.get("properties"), parameters.get("required", ())
    if not isinstance(listed, Mapping) or not _SAYS_MORE.isdisjoint(parameters):
        return False
    if not isinstance(required, list | tuple):
        return False
    return all(isinstance(name, str) and name in listed for name in required)


class _CopiedDefinitions:
    """Copies the targets of references into one `$defs`, under new names."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._names: dict[Path, str] = {}
        self._waiting: list[Part] = []

    def copy(self, part: Part) -> dict[str, Any]:
        if isinstance(part.schema, bool):
            return {} if part.schema else {"not": {}}
        copied: dict[str, Any] = json.loads(json.dumps(part.schema))
        for path, inner in list(subschemas_of(copied)):
            if isinstance(inner, dict):
                target = self._view.target(Part((*part.path, *path), inner))
                for name in _NAMES:
                    inner.pop(name, None)
                if target:
                    inner["$ref"] = reference(("$defs", self._name(target)))
        return copied

    def definitions(self) -> dict[str, Any]:
        found = {}
        while self._waiting:
            part = self._waiting.pop()
            found[self._names[part.path]] = self.copy(part)
        return found

    def _name(self, target: Part) -> str:
        if target.path not in self._names:
            last = target.path[-1] if target.path else "root"
            # plain characters, because not every reader of references decodes them
            self._names[target.path] = f"{len(self._names)}-{re.sub(r'[^a-zA-Z0-9_]', '_', last)}"
            self._waiting.append(target)
        return self._names[target.path]


def flattened(start: Part, view: View) -> Iterator[Part]:
    """Yields this schema, the target of its `$ref`, the schemas of its `allOf`, and theirs in
    turn."""
    waiting, seen = [start], set()
    while waiting:
        part = waiting.pop(0)
        if part.path in seen or isinstance(part.schema, bool):
            continue
        seen.add(part.path)
        yield part
        target = view.target(part)
        listed = enumerate(part.schema.get("allOf", ()))
        inside = [Part((*part.path, "allOf", str(at)), inner) for at, inner in listed]
        waiting += [*([target] if target else []), *inside]


def _followed(part: Part, view: View) -> Part:
    """Follows references as long as a schema is nothing but a reference."""
    seen = set()
    while isinstance(part.schema, Mapping) and part.path not in seen:
        seen.add(part.path)
        target = view.target(part)
        if not target or set(part.schema) - {"$ref", "title", "description", "default", *_NAMES}:
            break
        part = target
    return part


def _member(part: Part, key: str) -> Part | None:
    if isinstance(part.schema, bool):
        return None
    properties = part.schema.get("properties", {})
    if key in properties:
        return Part((*part.path, "properties", key), properties[key])
    if "additionalProperties" in part.schema and not part.schema.get("patternProperties"):
        return Part((*part.path, "additionalProperties"), part.schema["additionalProperties"])
    return None
