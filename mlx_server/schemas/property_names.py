"""Expresses `propertyNames` by keywords that a grammar can enforce.

Names that are listed, as those of `dict[Literal["a", "b"], int]`, become `properties` with no
others allowed. Names of a pattern become `patternProperties` with no others allowed.
"""

from collections.abc import Mapping
from typing import Any

from mlx_server import limits
from mlx_server.schemas import patterns
from mlx_server.schemas.view import Part, Schema, View, reference

_SAYS_NOTHING = frozenset(("type", "title", "description"))
_OTHERS = ("properties", "patternProperties", "unevaluatedProperties")
_COUNTS = ("minProperties", "maxProperties")


def listed_names(view: View, part: Part) -> list[str] | None:
    """Returns the only names that the members of an object may have; None if they can't be written
    as properties."""
    names = _of_names(view, part)
    return None if names is None else _names(names)


def names_pattern(view: View, part: Part) -> str | None:
    """Returns the pattern of an object's members' names, if `propertyNames` has nothing else; else
    None."""
    names = _of_names(view, part)
    if names is None or names.get("type", "string") != "string":
        return None
    pattern = names.get("pattern")
    if names.keys() - _SAYS_NOTHING != {"pattern"} or patterns.unsupported(names["pattern"]):
        return None
    return str(pattern)


def _of_names(view: View, part: Part) -> Mapping[str, Any] | None:
    """Returns the schema of the names; None if its meaning depends on the schema around it."""
    path, schema = part
    if isinstance(schema, bool) or "propertyNames" not in schema:
        return None
    if any(schema.get(key) for key in _OTHERS) or any(key in schema for key in _COUNTS):
        return None
    names, inner = (*path, "propertyNames"), (*path, "additionalProperties")
    if not view.referred_places.isdisjoint((names, inner)):
        return None
    said = schema["propertyNames"]
    if not isinstance(said, bool) and said.keys() == {"$ref"}:
        target = view.target(Part(names, said))
        said = target.schema if target else True
    return None if isinstance(said, bool) else said


def _names(schema: Mapping[str, Any]) -> list[str] | None:
    if schema.get("type", "string") != "string":
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    said = schema.keys() - _SAYS_NOTHING
    if values is None or len(said) > 1 or len(values) > limits.SCHEMA_VARIANT_MEMBERS:
        return None
    return list(dict.fromkeys(value for value in values if isinstance(value, str)))


def list_names(schema: dict[str, Any], part: Part, names: list[str]) -> None:
    """Writes the names as properties. The first has the schema of the members, and the others refer
    to it, so that it is written once."""
    inner: Schema = schema.pop("additionalProperties", True)
    first, *others = names or [""]
    same = (
        inner if isinstance(inner, bool) else {"$ref": reference((*part.path, "properties", first))}
    )
    schema["properties"] = {first: inner, **dict.fromkeys(others, same)} if names else {}
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def match_names(schema: dict[str, Any], pattern: str) -> None:
    """Writes the pattern of all names as a pattern of properties."""
    inner: Schema = schema.pop("additionalProperties", True)
    schema["patternProperties"] = {patterns.as_rust(pattern): inner}
    schema["additionalProperties"] = False
    del schema["propertyNames"]
