"""A schema seen as kinds of values, for notations that write values in a way of their own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_server.grammars.lark import Lark
from mlx_server.grammars.members import member, properties_of, required_of
from mlx_server.messages import Tool
from mlx_server.repair.coerce import DEEPEST, resolved, types_of

Schema = Mapping[str, Any]

TOLD = {"title", "description", "default", "examples", "deprecated", "$comment", "format"}
"""Keywords that take nothing from what may be written; `format` is left to JSON."""

NUMBER = r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,2})?"
"""None that is infinite to a computer."""

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KEYWORDS = {
    "integer": NUMBERS,
    "number": NUMBERS,
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
    "string": ("minLength", "maxLength", "pattern"),
}
"""Of values of a type; others mean nothing to them."""

EITHER = ("anyOf", "oneOf")
DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class Value:
    schema: Schema
    root: Schema
    """Where its references lead."""

    @property
    def types(self) -> frozenset[str]:
        found = types_of(self.schema, self.root)
        return found - {"integer"} if "number" in found else found

    def of(self, schema: Any) -> "Value":
        """A part of it."""
        return Value(schema if isinstance(schema, Mapping) else {}, self.root)

    @property
    def target(self) -> "Value | None":
        """What it is a reference to, if it says no more than that."""
        if not isinstance(self.schema.get("$ref"), str) or not self.says_only("$ref"):
            return None
        return self.of(resolved({"$ref": self.schema["$ref"]}, self.root))

    @property
    def alternatives(self) -> "list[Value]":
        """Of which one may be taken, if it says no more than that and their type."""
        for key in EITHER:
            if isinstance(listed := self.schema.get(key), list) and self.says_only(key, "type"):
                own = {name: said for name, said in self.schema.items() if name != key}
                return [self.of({**own, **self.of(option).schema}) for option in listed]
        return []

    def options(self, depth: int = DEEPEST) -> Iterator["Value"]:
        """All of those, references followed."""
        nearer = [self.target] if self.target else self.alternatives
        if not nearer or not depth:
            yield self
        for value in nearer if depth else ():
            yield from value.options(depth - 1)

    @property
    def listed(self) -> list[Any] | None:
        """The only values that there are, if they are listed."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        return values if isinstance(values, list) else None

    def says_only(self, *keywords: str) -> bool:
        return self.schema.keys() <= TOLD.union(keywords, DEFINITIONS)

    def is_any(self, type: str) -> bool:
        """Whether it says no more of values of this type, which it allows."""
        said = KEYWORDS.get(type, ())
        others = (key for keys in KEYWORDS.values() for key in keys if key not in said)
        return self.says_only("type", *others)

    def as_json(self, lark: Lark, *types: str) -> str:
        """types: those of its own to be taken; all, if none are given."""
        if {"number"} == set(types or self.types) and self.is_any("number"):
            return lark.terminal(f"/{NUMBER}/")
        definitions = {key: self.root[key] for key in DEFINITIONS if key in self.root}
        own = {"type": sorted(types)} if types else {}
        return lark.json({**definitions, **self.schema, **own}, lenient=True)


@dataclass(frozen=True)
class Member:
    key: str
    value: Value
    required: bool


def members(of: Value) -> list[Member]:
    """Those that an object's schema lists itself."""
    required = of.schema.get("required", ())
    listed = of.schema.get("properties", {})
    return [Member(key, of.of(schema), key in required) for key, schema in listed.items()]


def arguments_of(tool: Tool) -> list[Member]:
    """In the schema's order, those last that it only requires. Others are not offered."""
    required = required_of(tool.parameters)
    keys = [*properties_of(tool.parameters), *sorted(required)]
    values = {key: member(tool.parameters, key) for key in dict.fromkeys(keys)}
    return [Member(key, Value(value, value), key in required) for key, value in values.items()]
