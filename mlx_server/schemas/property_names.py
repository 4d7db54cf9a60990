"""`propertyNames` that lists names, as those of `dict[Literal["a", "b"], int]`: the same as
`properties` of these names and no others, which a grammar can say."""

from typing import Any

from mlx_server import limits
from mlx_server.schemas.view import Part, Schema, View, reference

_SAYS_NOTHING = frozenset(("type", "title", "description"))
_OTHERS = ("properties", "patternProperties", "unevaluatedProperties")
_COUNTS = ("minProperties", "maxProperties")


def listed_names(view: View, part: Part) -> list[str] | None:
    """The only names that the members of an object may have; None if they can't be written as
    properties."""
    path, schema = part
    if isinstance(schema, bool) or "propertyNames" not in schema:
        return None
    if any(schema.get(key) for key in _OTHERS) or any(key in schema for key in _COUNTS):
        return None
    names, inner = (*path, "propertyNames"), (*path, "additionalProperties")
    if not view.referred_places.isdisjoint((names, inner)):
        return None
    return _names(view, Part(names, schema["propertyNames"]))


def _names(view: View, part: Part) -> list[str] | None:
    schema = part.schema
    if not isinstance(schema, bool) and schema.keys() == {"$ref"}:
        target = view.target(part)
        schema = target.schema if target else True
    if isinstance(schema, bool) or schema.get("type", "string") != "string":
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    said = schema.keys() - _SAYS_NOTHING
    if values is None or len(said) > 1 or len(values) > limits.SCHEMA_VARIANT_MEMBERS.value:
        return None
    return list(dict.fromkeys(value for value in values if isinstance(value, str)))


def list_names(schema: dict[str, Any], part: Part, names: list[str]) -> None:
    """Writes the names as properties. The first has the schema of the members, and the others
    refer to it, so that it is there once."""
    inner: Schema = schema.pop("additionalProperties", True)
    first, *others = names or [""]
    same = (
        inner if isinstance(inner, bool) else {"$ref": reference((*part.path, "properties", first))}
    )
    schema["properties"] = {first: inner, **dict.fromkeys(others, same)} if names else {}
    schema["additionalProperties"] = False
    del schema["propertyNames"]
