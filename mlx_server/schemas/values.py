"""A schema seen as kinds of values, for call formats that write values in a syntax of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_server import limits
from mlx_server.messages import Tool
from mlx_server.schemas.bounds import NUMERIC
from mlx_server.schemas.lenient import types_of_member
from mlx_server.schemas.members import is_forbidden, member, properties_of, required_of
from mlx_server.schemas.types import types_of
from mlx_server.schemas.variants import variants_of
from mlx_server.schemas.view import Part, View

Schema = Mapping[str, Any]

ANYTHING: Schema = {}
NOTHING: Schema = {"enum": []}

TYPE_KEYWORDS = {"title", "description", "default", "examples", "deprecated", "$comment"}
"""Keywords that only describe values and exclude none."""

KEYWORDS = {
    "integer": NUMERIC,
    "number": NUMERIC,
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
    "string": ("minLength", "maxLength", "pattern", "format"),
}
"""The keywords that constrain values of each type; others mean nothing to that type."""

EITHER = ("anyOf", "oneOf")
DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class ValueSchema:
    schema: Schema
    root: View
    """The whole schema, in which the references of this part are looked up."""
    read_as: frozenset[str] = frozenset()
    """The types that the parser may find in a text, since it sees less of the schema."""

    @cached_property
    def types(self) -> frozenset[str]:
        found = frozenset[str]().union(*(option._own_types() for option in self.options))
        return found - {"integer"} if "number" in found else found

    def _own_types(self) -> frozenset[str]:
        found = types_of(self.schema, self.root)
        if "$ref" not in self.schema:
            return found
        siblings = {key: said for key, said in self.schema.items() if key != "$ref"}
        return found & types_of(siblings, self.root)

    def of(self, schema: Any) -> "ValueSchema":
        """Returns a part of the schema as a value's."""
        if isinstance(schema, Mapping):
            return ValueSchema(schema, self.root)
        return ValueSchema(NOTHING if schema is False else ANYTHING, self.root)

    @property
    def target(self) -> "ValueSchema | None":
        """The schema to which it refers, if it consists of the reference only."""
        if not isinstance(self.schema.get("$ref"), str) or not self.says_only("$ref"):
            return None
        return self._referred_to()

    def _referred_to(self) -> "ValueSchema":
        """Follows one reference only: following more at once would lose the keywords next to
        them."""
        found = self.root.target(Part((), {"$ref": self.schema["$ref"]}))
        return self.of(found.schema if found else ANYTHING)

    @property
    def alternatives(self) -> "list[ValueSchema]":
        """The alternatives, if the schema consists of them and their type only."""
        for key in EITHER:
            if isinstance(listed := self.schema.get(key), list) and self.says_only(key, "type"):
                options = [self.of(option) for option in listed]
                if "type" not in self.schema:
                    return options
                own, others = self.schema["type"], _common_types(options)
                if all(type == own for type in others):
                    return [self.of({"type": own, **option.schema}) for option in options]
        return []

    @property
    def also(self) -> "list[ValueSchema]":
        """The schemas that its references and `allOf` apply to the same value."""
        found = [self._referred_to()] if "$ref" in self.schema else []
        return [*found, *map(self.of, self.schema.get("allOf", ()))]

    @property
    def choices(self) -> "list[list[ValueSchema]]":
        """The lists of alternatives; one alternative of each list has to hold."""
        return [list(map(self.of, self.schema[key])) for key in EITHER if key in self.schema]

    @cached_property
    def options(self) -> "tuple[ValueSchema, ...]":
        """The schemas one of which a value follows: alternatives, and references that stand
        alone, are followed. Each schema comes once."""
        found, seen = list[ValueSchema](), dict[int, ValueSchema]()
        waiting = [(self, limits.COERCED_DEPTH)]
        while waiting:
            value, depth = waiting.pop()
            if id(value.schema) in seen:
                continue
            seen[id(value.schema)] = value  # kept, so that its id stays taken
            nearer = [value.target] if value.target else value.alternatives
            if depth and nearer:
                waiting += [(one, depth - 1) for one in reversed(nearer)]
            else:
                found.append(value)
        return tuple(found)

    @property
    def items(self) -> "ValueSchema | None":
        """The schema of a list's items; None if it has none, or one for each position."""
        found = self.schema.get("items", ANYTHING)
        return self.of(found) if isinstance(found, Mapping) else None

    @property
    def lists_all_members(self) -> bool:
        """Whether each required member is listed, and no listed one is forbidden."""
        listed = self.schema.get("properties", {})
        required = set(self.schema.get("required", ()))
        return False not in listed.values() and listed.keys() >= required

    @property
    def reference(self) -> str:
        return str(self.schema.get("$ref", ""))

    @property
    def others(self) -> "ValueSchema | None":
        """The schema of members that are not listed; None if there may be none."""
        found = self.schema.get("additionalProperties", ANYTHING)
        return None if found is False else self.of(found)

    @property
    def listed(self) -> list[Any] | None:
        """The only allowed values, if the schema lists them; else None."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        return values if isinstance(values, list) else None

    @property
    def pattern(self) -> str:
        """The regular expression that is found in each text; empty if the schema has none."""
        found: str = self.schema.get("pattern", "")
        return found

    @property
    def format(self) -> str:
        """The name of the texts' format; empty if the schema has none."""
        found: str = self.schema.get("format", "")
        return found

    def counts(self, least: str, most: str) -> tuple[int, int | None]:
        """Returns the values of these keywords, which may be written 2.0."""
        limit = self.schema.get(most)
        return int(self.schema.get(least, 0)), None if limit is None else int(limit)

    def may_list(self, value: Any) -> bool:
        """Whether the schema's type allows a listed value."""
        return bool(types_of({"const": value}, self.root) & types_of(self.schema, self.root))

    def says_only(self, *keywords: str) -> bool:
        return self.schema.keys() <= TYPE_KEYWORDS.union(keywords, DEFINITIONS)

    def is_any(self, type: str) -> bool:
        """Whether the schema allows all values of this type."""
        said = KEYWORDS.get(type, ())
        others = (key for keys in KEYWORDS.values() for key in keys if key not in said)
        return self.says_only("type", *others)


@dataclass(frozen=True)
class MemberSchema:
    key: str
    value: ValueSchema
    required: bool


def members(of: ValueSchema) -> list[MemberSchema]:
    """Returns the members that an object's schema lists itself."""
    required = of.schema.get("required", ())
    listed = of.schema.get("properties", {})
    return [MemberSchema(key, of.of(schema), key in required) for key, schema in listed.items()]


def arguments_of(tool: Tool) -> list[list[MemberSchema]]:
    """Returns the arguments of each way to call the tool, in the schema's order; those that are
    required but not listed come last. No others are offered."""
    found = (_arguments(tool, way.schema) for way in variants_of(tool.parameters))
    return [way for way in found if way is not None]


def _arguments(tool: Tool, schema: Schema) -> list[MemberSchema] | None:
    """Returns None if the schema forbids a member that it requires."""
    view, required = View(schema), required_of(schema)
    keys = dict.fromkeys([*properties_of(schema), *sorted(required)])
    forbidden = {key for key in keys if is_forbidden(view, key)}
    if forbidden & required:
        return None
    said = {key: member(schema, key) for key in keys if key not in forbidden}
    return [
        MemberSchema(
            key,
            ValueSchema(value, View(value), types_of_member(tool.parameters, key)),
            key in required,
        )
        for key, value in said.items()
    ]


def _common_types(values: list[ValueSchema]) -> list[Any]:
    return [value.schema["type"] for value in values if "type" in value.schema]
