"""Splits a schema that allows several sets of members into one schema for each set."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.schemas.members import flattened, properties_of, required_of
from mlx_server.schemas.types import named
from mlx_server.schemas.view import Part, Path, View, reference


class Alternatives(NamedTuple):
    path: Path
    """The path of the keyword that offers the alternatives."""
    options: list[Mapping[str, Any]]
    """Schemas, any one of which may be added to the schema; empty if they can't be listed."""


class Variant(NamedTuple):
    schema: Mapping[str, Any]
    made: tuple[Path, ...] = ()
    """The paths of the choices that were made by additions to its `allOf`."""

    def choices(self) -> list[Alternatives]:
        """Returns the choices that are still to be made."""
        view = View(self.schema)
        listed, required = [*properties_of(self.schema)], required_of(self.schema)
        found: list[Alternatives] = []
        for part in flattened(Part((), self.schema), view):
            found += [*_of_options(part), *_of_counts(part, listed, required)]
        return [choice for choice in found if choice.path not in self.made]

    def taking(self, choice: Alternatives) -> "list[Variant]":
        parts, made = self.schema.get("allOf", ()), (*self.made, choice.path)
        return [Variant({**self.schema, "allOf": [*parts, one]}, made) for one in choice.options]


def _of_options(part: Part) -> Iterator[Alternatives]:
    path, schema = part
    for key in ("anyOf", "oneOf"):
        if isinstance(schema, Mapping) and key in schema:
            options = enumerate(schema[key])
            open = [(*path, key, str(at)) for at, option in options if _may_be_object(option)]
            yield Alternatives((*path, key), [{"$ref": reference(option)} for option in open])


def _of_counts(part: Part, listed: list[str], required: frozenset[str]) -> Iterator[Alternatives]:
    path, schema = part
    said = schema if isinstance(schema, Mapping) else {}
    least, most = said.get("minProperties", 0), said.get("maxProperties", math.inf)
    if len(required) < least:
        more = listed if least == 1 else ()
        yield Alternatives((*path, "minProperties"), [{"required": [name]} for name in more])
    if len(required.union(listed)) > most:
        yield Alternatives((*path, "maxProperties"), [])


def variants_of(schema: Mapping[str, Any]) -> list[Variant]:
    """Returns the schema's variants; only the schema itself if it offers no choice."""
    waiting, found = [Variant(schema)], list[Variant]()
    most = min(
        limits.SCHEMA_VARIANTS,
        limits.SCHEMA_VARIANT_MEMBERS // (1 + len(properties_of(schema))),
    )
    while waiting:
        variant = waiting.pop(0)
        room = most - len(found) - len(waiting)
        choice = next((c for c in variant.choices() if 0 < len(c.options) <= room), None)
        if choice:
            waiting += variant.taking(choice)
        else:
            found.append(variant)
    return found


def _may_be_object(schema: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    return "object" in named(schema)
