"""A schema that leaves a choice among whole sets of members, as one schema for each of them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.schemas.members import flattened, properties_of, required_of
from mlx_server.schemas.types import named
from mlx_server.schemas.view import Part, Path, View, reference


class Alternatives(NamedTuple):
    path: Path
    """Of the keyword that leaves it."""
    options: list[Mapping[str, Any]]
    """Any of which may be added to the schema; none, if they can't be told."""


class Variant(NamedTuple):
    schema: Mapping[str, Any]
    made: tuple[Path, ...] = ()
    """Choices that its `allOf` tells of."""

    def choices(self) -> list[Alternatives]:
        """Those left."""
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
    """Only itself, if it leaves no choice."""
    waiting, found = [Variant(schema)], list[Variant]()
    most = min(
        limits.SCHEMA_WAYS.value,
        limits.SCHEMA_WAYS_MEMBERS.value // (1 + len(properties_of(schema))),
    )
    while waiting:
        way = waiting.pop(0)
        room = most - len(found) - len(waiting)
        choice = next((c for c in way.choices() if 0 < len(c.options) <= room), None)
        if choice:
            waiting += way.taking(choice)
        else:
            found.append(way)
    return found


def _may_be_object(schema: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    return "object" in named(schema)
