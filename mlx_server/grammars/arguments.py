"""What a tool's schema says of arguments.

First what it plainly says: names, types and required members, in limited time and without failing,
where more is allowed if a schema is unclear; whether arguments fit that. Then the members of a
schema that can be used, its variants, and kinds of values, for call formats that write arguments
one by one.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.grammars.grammar import NUMERIC, UnsupportedKeyword
from mlx_server.grammars.patterns import search_pattern
from mlx_server.grammars.view import (
    DEFINITIONS,
    Part,
    Path,
    Schema,
    View,
    flattened,
    named,
    properties_in,
    reference,
    required_by,
    resolved,
    subschemas_of,
    type_of,
    types_of,
)
from mlx_server.messages import Tool

Keywords = Mapping[str, Any]

COMBINED = ("allOf", "oneOf", "anyOf")


def parts_of(schema: Keywords, view: View, keywords: Sequence[str] = COMBINED) -> list[Keywords]:
    """Returns the schema and the schemas that these keywords and `$ref` apply to the same value,
    each once."""
    parts = islice(flattened(Part((), schema), view, keywords), limits.COERCED_PARTS)
    return [part.schema for part in parts if isinstance(part.schema, Mapping)]


def required(schema: Keywords) -> list[str]:
    """Returns the required arguments in the schema's order. Those that only one of several
    alternatives requires are left out."""
    parts = flattened(Part((), schema), View(schema))
    return list(dict.fromkeys(name for part in parts for name in required_by(part.schema)))


def member_schemas(schema: Keywords, key: str, view: View) -> list[Keywords]:
    """Returns the schemas that the parts of an object's schema have for this key."""
    parts = parts_of(schema, view)
    own = [listed[key] for part in parts if key in (listed := properties_in(part))]
    schemas = own or [part.get("additionalProperties") for part in parts]
    return [each for each in schemas if isinstance(each, Mapping)]


def lenient_member(schema: Keywords, key: str, view: View) -> Keywords:
    return _any_of(member_schemas(schema, key, view))


def lenient_items(schema: Keywords, view: View) -> Keywords:
    return _any_of([part.get("items") for part in parts_of(schema, view)])


def types_of_member(schema: Keywords, key: str) -> frozenset[str]:
    """Returns the JSON types that the schema allows for this key."""
    view = View(schema)
    return types_of(lenient_member(schema, key, view), view)


def _any_of(values: Sequence[Any]) -> Keywords:
    """Returns a schema that allows what any of these schemas allows."""
    schemas = [schema for schema in values if isinstance(schema, Mapping)]
    return {"anyOf": schemas} if len(schemas) > 1 else next(iter(schemas), {})


def fits(arguments: Mapping[str, Any], schema: Keywords) -> bool:
    view = View(schema)
    return _fits_object(arguments, schema, view, limits.COERCED_DEPTH)


def is_made_of(arguments: Mapping[str, Any], schema: Keywords) -> bool:
    """Whether the arguments fit, and each of them is one that the schema names."""
    view = View(schema)
    named = {key for part in parts_of(schema, view, ("allOf",)) for key in properties_in(part)}
    return bool(arguments) and arguments.keys() <= named and fits(arguments, schema)


def _fits(value: Any, schema: Keywords, view: View, depth: int) -> bool:
    schema = resolved(schema, view)
    options = schema.get("enum")
    if isinstance(options, list) and value not in options:
        return False
    if type_of(value) not in types_of(schema, view) or schema.get("const", value) != value:
        return False
    match value:
        case dict() if depth:
            return _fits_object(value, schema, view, depth - 1)
        case list() if depth:
            items = schema.get("items")
            return not isinstance(items, Mapping) or all(
                _fits(item, items, view, depth - 1) for item in value
            )
    return True


def _fits_object(value: Mapping[str, Any], schema: Keywords, view: View, depth: int) -> bool:
    for part in parts_of(schema, view, ("allOf",)):
        if not value.keys() >= set(required_by(part)):
            return False
        properties = properties_in(part)
        closed = part.get("additionalProperties") is False and "patternProperties" not in part
        if closed and not value.keys() <= properties.keys():
            return False
    return all(
        any(_fits(item, option, view, depth) for option in options)
        for key, item in value.items()
        if (options := member_schemas(schema, key, view))
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


def properties_of(schema: Schema) -> dict[str, Schema]:
    """Returns the properties that the schema lists, itself or through its `$ref` and `allOf`."""
    properties: dict[str, Schema] = {}
    for part in flattened(Part((), schema), View(schema)):
        properties |= {k: v for k, v in properties_in(part.schema).items() if k not in properties}
    return properties


def lists_properties(schema: Mapping[str, Any]) -> bool:
    """Whether the schema itself lists any property."""
    return bool(schema.get("properties"))


def members(view: View, key: str) -> list[Part]:
    """Returns all the schemas that constrain one member."""
    parts = flattened(Part((), view.root), view)
    return [inner for part in parts if (inner := _member(part, key))]


def is_forbidden(view: View, key: str) -> bool:
    return any(part.schema is False for part in members(view, key))


def member(schema: Schema, key: str) -> Mapping[str, Any]:
    """Returns the schema of one member as a root of its own, with everything that it refers to.

    A name that is not listed has the schema of `additionalProperties`, unless the object has
    `patternProperties`: matching a client's pattern here could take for ever.
    """
    view = View(schema)
    parts = [part for part in members(view, key) if part.schema is not True]
    carried = _CopiedDefinitions(view)
    own = [carried.copy(_followed(part, view)) for part in parts]
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


def framed(frame: Mapping[str, Any], key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object, `frame`, whose member `key` has this schema."""
    view = View(schema)
    carried = _CopiedDefinitions(view)
    inner = carried.copy(Part((), view.root))
    inner = {keyword: value for keyword, value in inner.items() if keyword not in DEFINITIONS}
    members = {**frame["properties"], key: inner}
    return {**frame, "properties": members, "$defs": carried.definitions()}


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
        definitions = {}
        while self._waiting:
            part = self._waiting.pop()
            definitions[self._names[part.path]] = self.copy(part)
        return definitions

    def _name(self, target: Part) -> str:
        if target.path not in self._names:
            last = target.path[-1] if target.path else "root"
            # plain characters, because not every reader of references decodes them
            self._names[target.path] = f"{len(self._names)}-{re.sub(r'[^a-zA-Z0-9_]', '_', last)}"
            self._waiting.append(target)
        return self._names[target.path]


def _followed(part: Part, view: View) -> Part:
    """Follows references as long as a schema is nothing but a reference."""
    paths = set()
    while isinstance(part.schema, Mapping) and part.path not in paths:
        paths.add(part.path)
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
        choices: list[Alternatives] = []
        for part in flattened(Part((), self.schema), View(self.schema)):
            choices += [*_of_options(part), *_of_counts(part, self.schema)]
        return [choice for choice in choices if choice.path not in self.made]

    def taking(self, choice: Alternatives) -> "list[Variant]":
        parts, paths = self.schema.get("allOf", ()), (*self.made, choice.path)
        return [Variant({**self.schema, "allOf": [*parts, one]}, paths) for one in choice.options]


def _of_options(part: Part) -> Iterator[Alternatives]:
    path, schema = part
    for key in ("anyOf", "oneOf"):
        if isinstance(schema, Mapping) and key in schema:
            options = enumerate(schema[key])
            open = [(*path, key, str(at)) for at, option in options if _may_be_object(option)]
            yield Alternatives((*path, key), [{"$ref": reference(option)} for option in open])


def _of_counts(part: Part, whole: Keywords) -> Iterator[Alternatives]:
    path, schema = part
    if isinstance(schema, bool) or {"minProperties", "maxProperties"}.isdisjoint(schema):
        return
    least, most = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
    listed, must = properties_of(whole), required(whole)
    if len(must) < least:
        more = listed if least == 1 else ()
        yield Alternatives((*path, "minProperties"), [{"required": [name]} for name in more])
    if len({*must, *listed}) > most:
        yield Alternatives((*path, "maxProperties"), [])


def variants_of(schema: Mapping[str, Any]) -> list[Variant]:
    """Returns the schema's variants; only the schema itself if it offers no choice."""
    waiting, variants = [Variant(schema)], list[Variant]()
    most = min(
        limits.SCHEMA_VARIANTS, limits.SCHEMA_VARIANT_MEMBERS // (1 + len(properties_of(schema)))
    )
    while waiting:
        variant = waiting.pop(0)
        room = most - len(variants) - len(waiting)
        choice = next((c for c in variant.choices() if 0 < len(c.options) <= room), None)
        if choice:
            waiting += variant.taking(choice)
        else:
            variants.append(variant)
    return variants


def _may_be_object(schema: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    return "object" in named(schema)


ANYTHING: Keywords = {}
NOTHING: Keywords = {"enum": []}

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


@dataclass(frozen=True)
class ValueSchema:
    schema: Keywords
    root: View
    """The whole schema, in which the references of this part are looked up."""
    read_as: frozenset[str] = frozenset()
    """The types that the parser may find in a text, since it sees less of the schema."""

    @cached_property
    def types(self) -> frozenset[str]:
        types = frozenset[str]().union(*(option._own_types() for option in self.options))
        return types - {"integer"} if "number" in types else types

    def _own_types(self) -> frozenset[str]:
        types = types_of(self.schema, self.root)
        if "$ref" not in self.schema:
            return types
        siblings = {key: value for key, value in self.schema.items() if key != "$ref"}
        return types & types_of(siblings, self.root)

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
        target = self.root.target(Part((), {"$ref": self.schema["$ref"]}))
        return self.of(target.schema if target else ANYTHING)

    @property
    def alternatives(self) -> "list[ValueSchema]":
        """The alternatives, if the schema consists of them and their type only."""
        for key in EITHER:
            if isinstance(listed := self.schema.get(key), list) and self.says_only(key, "type"):
                options = [self.of(option) for option in listed]
                if "type" not in self.schema:
                    return options
                own = self.schema["type"]
                if all(option.schema.get("type", own) == own for option in options):
                    return [self.of({"type": own, **option.schema}) for option in options]
        return []

    @property
    def also(self) -> "list[ValueSchema]":
        """The schemas that its references and `allOf` apply to the same value."""
        values = [self._referred_to()] if "$ref" in self.schema else []
        return [*values, *map(self.of, self.schema.get("allOf", ()))]

    @property
    def choices(self) -> "list[list[ValueSchema]]":
        """The lists of alternatives; one alternative of each list has to hold."""
        return [list(map(self.of, self.schema[key])) for key in EITHER if key in self.schema]

    @cached_property
    def options(self) -> "tuple[ValueSchema, ...]":
        """The schemas one of which a value follows: alternatives, and references that stand
        alone, are followed. Each schema comes once."""
        leaves, seen = list[ValueSchema](), dict[int, ValueSchema]()
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
                leaves.append(value)
        return tuple(leaves)

    @property
    def items(self) -> "ValueSchema | None":
        """The schema of a list's items; None if it has none, or one for each position."""
        schema = self.schema.get("items", ANYTHING)
        return self.of(schema) if isinstance(schema, Mapping) else None

    @property
    def lists_all_members(self) -> bool:
        """Whether each required member is listed, and no listed one is forbidden."""
        listed = self.schema.get("properties", {})
        required = set(self.schema.get("required", ()))
        return False not in listed.values() and listed.keys() >= required

    @property
    def others(self) -> "ValueSchema | None":
        """The schema of members that are not listed; None if there may be none."""
        schema = self.schema.get("additionalProperties", ANYTHING)
        return None if schema is False else self.of(schema)

    @property
    def listed(self) -> list[Any] | None:
        """The only allowed values, if the schema lists them; else None."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        return values if isinstance(values, list) else None

    @property
    def pattern(self) -> str:
        """The regular expression that is found in each text; empty if the schema has none."""
        pattern: str = self.schema.get("pattern", "")
        return pattern

    @property
    def format(self) -> str:
        """The name of the texts' format; empty if the schema has none."""
        format_name: str = self.schema.get("format", "")
        return format_name

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
        keywords = KEYWORDS.get(type, ())
        others = (key for keys in KEYWORDS.values() for key in keys if key not in keywords)
        return self.says_only("type", *others)


@dataclass(frozen=True)
class MemberSchema:
    key: str
    value: ValueSchema
    required: bool


def listed_members(of: ValueSchema) -> list[MemberSchema]:
    """Returns the members that an object's schema lists itself."""
    required = of.schema.get("required", ())
    listed = of.schema.get("properties", {})
    return [MemberSchema(key, of.of(schema), key in required) for key, schema in listed.items()]


def arguments_of(tool: Tool) -> list[list[MemberSchema]]:
    """Returns the arguments of each way to call the tool, in the schema's order; those that are
    required but not listed come last. No others are offered."""
    variants = (_arguments(tool, way.schema) for way in variants_of(tool.parameters))
    return [way for way in variants if way is not None]


def _arguments(tool: Tool, schema: Keywords) -> list[MemberSchema] | None:
    """Returns None if the schema forbids a member that it requires."""
    view, must = View(schema), required(schema)
    keys = dict.fromkeys([*properties_of(schema), *must])
    forbidden = {key for key in keys if is_forbidden(view, key)}
    if not forbidden.isdisjoint(must):
        return None
    values = {key: member(schema, key) for key in keys if key not in forbidden}
    return [
        MemberSchema(
            key, ValueSchema(value, View(value), types_of_member(tool.parameters, key)), key in must
        )
        for key, value in values.items()
    ]


def unsupported_one_by_one(tool: Tool) -> list[UnsupportedKeyword]:
    """Returns the keywords that are not enforced in arguments written one by one, besides those
    that are not enforced in JSON either."""
    return list(
        dict.fromkeys(chain.from_iterable(map(_unsupported_members, variants_of(tool.parameters))))
    )


def unsupported_as_text(tool: Tool) -> list[UnsupportedKeyword]:
    """Returns the same keywords for arguments written as text between delimiters."""
    patterns = chain.from_iterable(map(_unsupported_patterns, variants_of(tool.parameters)))
    return list(dict.fromkeys([*unsupported_one_by_one(tool), *patterns]))


def _unsupported_members(variant: Variant) -> Iterator[UnsupportedKeyword]:
    for choice in variant.choices():
        yield UnsupportedKeyword(
            choice.path[:-1], choice.path[-1], "can't be enforced as this model writes calls"
        )
    for path, schema in flattened(Part((), variant.schema), View(variant.schema)):
        if isinstance(schema, Mapping) and schema.get("patternProperties"):
            yield UnsupportedKeyword(
                path, "patternProperties", "can't be enforced as this model writes calls"
            )


def _unsupported_patterns(variant: Variant) -> Iterator[UnsupportedKeyword]:
    view = View(variant.schema)
    for key in [*properties_of(variant.schema), *required(variant.schema)]:
        parts = (flattened(part, view, COMBINED) for part in members(view, key))
        for path, schema in chain.from_iterable(parts):
            if isinstance(schema, Mapping) and search_pattern(schema.get("pattern", "")) is None:
                yield UnsupportedKeyword(
                    path, "pattern", "can't be enforced as this model writes text"
                )
