"""A schema that leaves a choice among whole sets of members, as one schema for each of them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.grammars.document import Document, Part, Path, reference
from mlx_server.grammars.members import plainly, properties_of, required_of


class Choice(NamedTuple):
    path: Path
    """Of the keyword that leaves it."""
    options: list[Mapping[str, Any]]
    """Any of which may be added to the schema; none, if they can't be told."""


class Way(NamedTuple):
    schema: Mapping[str, Any]
    made: tuple[Path, ...] = ()
    """Choices that its `allOf` tells of."""

    def choices(self) -> list[Choice]:
        """Those left."""
        document = Document(self.schema)
        listed, required = [*properties_of(self.schema)], required_of(self.schema)
        found: list[Choice] = []
        for part in plainly(Part((), self.schema), document):
            found += [*_of_options(part), *_of_counts(part, listed, required)]
        return [choice for choice in found if choice.path not in self.made]

    def taking(self, choice: Choice) -> "list[Way]":
        parts, made = self.schema.get("allOf", ()), (*self.made, choice.path)
        return [Way({**self.schema, "allOf": [*parts, one]}, made) for one in choice.options]


def _of_options(part: Part) -> Iterator[Choice]:
    path, schema = part
    for key in ("anyOf", "oneOf"):
        if isinstance(schema, Mapping) and key in schema:
            options = enumerate(schema[key])
            open = [(*path, key, str(at)) for at, option in options if _may_be_object(option)]
            yield Choice((*path, key), [{"$ref": reference(option)} for option in open])


def _of_counts(part: Part, listed: list[str], required: frozenset[str]) -> Iterator[Choice]:
    path, schema = part
    said = schema if isinstance(schema, Mapping) else {}
    least, most = said.get("minProperties", 0), said.get("maxProperties", math.inf)
    if len(required) < least:
        more = listed if least == 1 else ()
        yield Choice((*path, "minProperties"), [{"required": [name]} for name in more])
    if len(required.union(listed)) > most:
        yield Choice((*path, "maxProperties"), [])


def ways_of(schema: Mapping[str, Any]) -> list[Way]:
    """Only itself, if it leaves no choice."""
    waiting, found = [Way(schema)], list[Way]()
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
    return "object" in schema.get("type", "object")
