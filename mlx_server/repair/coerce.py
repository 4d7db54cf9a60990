"""Arguments in the types that the tool's schema asks for, where nothing has to be guessed."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server import limits
from mlx_server.repair.exact import Written, exactly

INEXACT = 2**53
"""From here on a float may be another whole number than the one that was written."""

EVERYTHING = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})

Schema = Mapping[str, Any]


def takes_text(schema: Schema, key: str) -> bool:
    """Whether any text is right for this parameter as it stands. schema: of all arguments."""
    return types_read(schema, key) == {"string"}


def types_read(schema: Schema, key: str) -> frozenset[str]:
    """Those that are looked for in what is written of this parameter."""
    return types_of(_property(schema, key, schema), schema)


def coerced(value: Any, schema: Schema, key: str) -> Any:
    """The value of parameter `key`, in a type that its schema allows if there is a plain way."""
    return _coerced(value, _property(schema, key, schema), schema, limits.COERCED_DEPTH.value)


def read_as(text: str, schema: Schema, key: str) -> Any:
    """The value of parameter `key` from a notation that has no types: JSON where the schema asks
    for something else than text, or for nothing at all."""
    types = types_read(schema, key)
    if types == {"string"}:
        return text
    value = text if text.strip() == "None" else _parsed(text)
    if "string" in types and _type(value) not in types - {"string"}:
        return text  # any text is right, and nothing else that it could be read as
    return coerced(value, schema, key)


def _coerced(value: Any, wanted: Schema, root: Schema, depth: int) -> Any:
    types = types_of(wanted, root)
    if _type(value) not in types:
        value = _converted(value, types)
    return _inside(value, wanted, root, depth - 1) if depth else value


def _converted(value: Any, types: frozenset[str]) -> Any:
    """The same in one of these types; as it is if there is no plain way."""
    match value:
        case str():
            found = _parsed(value)
            if _type(found) not in types and isinstance(found, float):
                found = _converted(found, types)
            return found if _type(found) in types else value
        case float() if not math.isfinite(value):
            return value
        case float() if "integer" in types and value.is_integer() and abs(value) < INEXACT:
            return int(value)
        case Written() if "string" in types:
            return value.text
        case bool() | int() if "string" in types:
            return json.dumps(value)
    return value


def _inside(value: Any, wanted: Schema, root: Schema, depth: int) -> Any:
    match value:
        case dict():
            return {
                k: _coerced(v, _property(wanted, k, root), root, depth) for k, v in value.items()
            }
        case list():
            items = _one([part.get("items") for part in _parts(wanted, root)])
            return [_coerced(item, items, root, depth) for item in value]
    return value


def _parsed(text: str) -> Any:
    literals = {"True": True, "False": False, "None": None}
    word = text.strip()
    if word in literals:
        return literals[word]
    try:
        found = exactly(word, lambda name: name)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(found, float) and not math.isfinite(found) else found


def _type(value: Any) -> str:
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


def _property(schema: Schema, key: str, root: Schema) -> Schema:
    own: list[Any] = []
    others: list[Any] = []
    for part in _parts(schema, root):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            own.append(properties[key])
        others.append(part.get("additionalProperties"))
    return _one(own or others)


def _one(found: list[Any]) -> Schema:
    """What may be any of these."""
    schemas = [schema for schema in found if isinstance(schema, Mapping)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _parts(schema: Schema, root: Schema) -> list[Schema]:
    """The schema, and those that it is made of, each once."""
    found: dict[int, Schema] = {}
    left = [schema]
    while left and len(found) < limits.COERCED_PARTS.value:
        part = resolved(left.pop(), root)
        if id(part) not in found:
            found[id(part)] = part
            left += [o for key in ("allOf", "oneOf", "anyOf") for o in _listed(part, key)]
    return list(found.values())


def types_of(
    schema: Schema,
    root: Schema,
    depth: int = limits.COERCED_DEPTH.value,
    known: dict[int, frozenset[str]] | None = None,
) -> frozenset[str]:
    """What the schema allows, by the JSON types' names; everything if it does not say."""
    known = {} if known is None else known
    schema = resolved(schema, root)
    if not depth or len(known) > limits.COERCED_PARTS.value:
        return EVERYTHING
    if id(schema) not in known:
        types = known[id(schema)] = EVERYTHING  # what leads back to itself says no more
        for allowed in _said(schema, root, depth - 1, known):
            types &= allowed
        known[id(schema)] = types or EVERYTHING
    return known[id(schema)]


def _said(
    schema: Schema, root: Schema, depth: int, known: dict[int, frozenset[str]]
) -> Iterator[frozenset[str]]:
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    types = frozenset(name for name in names if isinstance(name, str)) & EVERYTHING
    yield (types | {"integer"} if "number" in types else types) or EVERYTHING
    for key in ("anyOf", "oneOf"):
        if options := _listed(schema, key):
            yield frozenset().union(*(types_of(o, root, depth, known) for o in options))
    for part in _listed(schema, "allOf"):
        yield types_of(part, root, depth, known)
    values = schema.get("enum")
    if isinstance(values, list) and values:
        yield frozenset(map(_type, values))
    if "const" in schema:
        yield frozenset({_type(schema["const"])})


def _listed(schema: Schema, key: str) -> list[Schema]:
    options = schema.get(key)
    listed = options[: limits.COERCED_PARTS.value] if isinstance(options, list) else []
    return [option if isinstance(option, Mapping) else {} for option in listed]


def resolved(schema: Schema, root: Schema) -> Schema:
    for _ in range(limits.COERCED_DEPTH.value):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: Any = root if reference.startswith("#") else None
        for step in filter(None, reference[1:].split("/")):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return {}
        schema = found
    return {}
