"""Recognises schemas of which llguidance is known to take every part.

Their grammar is compiled once, by the engine. That of any other schema is compiled before, in a
process that can be ended, so that what llguidance refuses is refused with its path.
"""

from collections.abc import Mapping
from typing import Any

from mlx_server.schemas.bounds import EXACT
from mlx_server.schemas.check import METASCHEMA
from mlx_server.schemas.report import ANNOTATIONS, FORMATS
from mlx_server.schemas.view import View

MOST_PARTS = 1000
LONGEST = 256
"""The largest number of characters or items that may be asked for."""

_CONSTRAINTS = frozenset((*METASCHEMA, "$ref", "const", "format", "x-guidance")) - ANNOTATIONS
_CONTAINERS = frozenset(
    ("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems")
)
_VALUES = frozenset(("type", "enum", "const"))
_LENGTHS = ("minLength", "maxLength")
_COUNTS = ("minItems", "maxItems")
_BOUNDS = ("minimum", "maximum")
_BY_TYPE = {
    "string": frozenset(("type", *_LENGTHS)),
    "integer": frozenset(("type", *_BOUNDS)),
    "number": frozenset(("type", *_BOUNDS)),
}
_CLASSES = {"string": str, "integer": int, "boolean": bool, "null": type(None)}


def is_plain(view: View) -> bool:
    schemas = [part.schema for part in view.reached()]
    if len(schemas) > MOST_PARTS:
        return False
    objects = [schema for schema in schemas if not isinstance(schema, bool)]
    closed = sum(schema.get("additionalProperties") is False for schema in objects)
    if schemas.count(False) > closed:  # a value is required to be nothing
        return False
    return all(_can_be_met(schema, _CONSTRAINTS.intersection(schema)) for schema in objects)


def _can_be_met(schema: Mapping[str, Any], keys: frozenset[str]) -> bool:
    """Whether some value conforms to these keywords of the schema, and llguidance knows it."""
    if len(keys) <= 1 and keys <= {"$ref", "anyOf"}:
        return True
    kind = schema.get("type")
    if keys == {"type", "format"}:
        return kind == "string" and schema["format"] in FORMATS
    if keys <= _BY_TYPE.get(kind if isinstance(kind, str) else "", frozenset()):
        return _in_order(schema, _LENGTHS, LONGEST) and _in_order(schema, _BOUNDS, EXACT)
    if keys <= _CONTAINERS:
        listed = set(schema.get("required", ())) <= set(schema.get("properties", ()))
        return (
            listed
            and isinstance(schema.get("items", {}), (Mapping, bool))
            and _in_order(schema, _COUNTS, LONGEST)
        )
    return keys <= _VALUES and len(keys & {"enum", "const"}) == 1 and _are_of(schema, kind)


def _in_order(schema: Mapping[str, Any], keys: tuple[str, str], largest: int) -> bool:
    """Whether the bounds that there are leave room between them."""
    least, most = (schema.get(key) for key in keys)
    known = [each for each in (least, most) if each is not None]
    exact = all(type(each) is int and abs(each) <= largest for each in known)
    return exact and (least is None or most is None or least <= most)


def _are_of(schema: Mapping[str, Any], kind: object) -> bool:
    """Whether the values that are listed are of the types that are listed."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    kinds = kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else _CLASSES
    classes = {_CLASSES[each] for each in kinds if each in _CLASSES}
    return all(type(value) in classes and _is_exact(value) for value in values)


def _is_exact(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) <= EXACT
