"""A JSON Schema as a tree of parts, and the targets of its references.

It is read as draft 2020-12; spellings of older drafts are accepted as well (`definitions`, lists in
`items`, `id: "#name"`). The library `referencing` would find the target of a reference, but not its
path, which is needed here because llguidance follows JSON pointers only.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from mlx_server import limits
from mlx_server.errors import InvalidGrammar

Schema = Mapping[str, Any] | bool
Path = tuple[str, ...]

NAMED = ("properties", "patternProperties", "dependentSchemas")
LISTED = ("prefixItems", "allOf", "anyOf", "oneOf")
SINGLE = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems"),
    *("unevaluatedProperties", "propertyNames", "contains", "not", "if", "then", "else"),
)
DEFINITIONS = ("$defs", "definitions")

_SHAPES = {
    **dict.fromkeys(NAMED, NAMED),
    **dict.fromkeys(DEFINITIONS, DEFINITIONS),
    **dict.fromkeys(LISTED, LISTED),
    **dict.fromkeys(SINGLE, SINGLE),
}
"""The way in which each keyword contains schemas."""
HOLDERS = frozenset(_SHAPES)
"""The keywords that contain schemas."""

_OBJECT = (dict, Mapping)
"""`dict` first: to ask whether it is a Mapping takes ten times as long."""
_SCHEMA = (dict, bool, Mapping)


class Part(NamedTuple):
    path: Path
    schema: Schema


class Links(NamedTuple):
    """The schemas that a part leads to."""

    used: list[Part]
    """The schemas directly inside it, without its definitions."""
    target: Part | None
    """The target of its `$ref`."""


LEADING = HOLDERS | {"$ref"}
"""The keywords that lead to other schemas."""
_NO_LINKS = Links([], None)


class View:
    """A schema and the targets of its references, which are `#`, `#/a/pointer` or `#anchor`.

    What its parts lead to is found once. Code that changes the schema calls `forget` afterwards.
    """

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._links: dict[Path, Links] = {}
        self._reached: list[Part] | None = None

    def forget(self) -> None:
        self._links, self._reached = {}, None

    def links(self, part: Part) -> Links:
        """Returns the schemas to which a part of this very schema leads. Raises InvalidGrammar."""
        if isinstance(part.schema, bool) or LEADING.isdisjoint(part.schema):
            return _NO_LINKS
        links = self._links.get(part.path)
        if links is None:
            links = self._links[part.path] = Links(children(part), self.target(part))
        return links

    @cached_property
    def _anchors(self) -> dict[str, Part]:
        anchors: dict[str, Part] = {}
        for part in subschemas_of(self.root, DEFINITIONS):
            for name in _anchors_of(part.schema):
                anchors.setdefault(name, part)
        return anchors

    @cached_property
    def referred_places(self) -> frozenset[Path]:
        """The paths of all targets of references, and of everything around them."""
        links = map(self.links, self.reached())
        targets = [each.target.path for each in links if each.target]
        return frozenset(path[:size] for path in targets for size in range(1 + len(path)))

    def target(self, part: Part) -> Part | None:
        """Returns the target of this part's `$ref`; None if it has none. Raises InvalidGrammar."""
        if isinstance(part.schema, bool) or "$ref" not in part.schema:
            return None
        ref, at = part.schema["$ref"], (*part.path, "$ref")
        if not isinstance(ref, str):
            raise refused(at, "must be a string")
        if not ref.startswith("#"):
            raise refused(
                at,
                f"refers to {shorten(ref)}, outside the schema. Only references into the schema"
                " itself can be used (such as #/$defs/name): copy what is referred to into $defs",
            )
        self._refuse_other_base(part.path)
        name = unquote(ref[1:])
        if name.startswith("/") or not name:
            return self._followed(name, at)
        if name not in self._anchors:
            raise refused(at, f"refers to {shorten(ref)}, but no $anchor of that name is there")
        return self._anchors[name]

    def referred(self, schema: Schema) -> Part | None:
        """Returns the target of the `$ref` of a part of this schema; None if there is none."""
        try:
            return self.target(Part((), schema))
        except InvalidGrammar:
            return None

    def reached(self) -> list[Part]:
        """Returns the root and all parts that it uses; definitions only if something refers to
        them."""
        if self._reached is None:
            parts, waiting = dict[Path, Part](), [Part((), self.root)]
            while waiting:
                part = waiting.pop()
                if part.path not in parts:
                    parts[part.path] = part
                    used, target = self.links(part)
                    waiting += [*reversed(used), *([target] if target else ())]
            self._reached = [*parts.values()]
        return self._reached

    def _followed(self, name: str, at: Path) -> Part:
        steps = name.split("/")[1:]
        path = tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)
        try:
            *_, schema = self._along(path)
        except (KeyError, IndexError, ValueError, TypeError):
            raise refused(at, f"refers to {shorten('#' + name)}, which is not there") from None
        if not isinstance(schema, _SCHEMA):
            raise refused(at, f"refers to {shorten('#' + name)}, which is not a schema")
        self._refuse_other_base(path)
        return Part(path, schema)

    def _along(self, path: Path) -> Iterator[Any]:
        value: Any = self.root
        yield value
        for step in path:
            value = value[int(step)] if isinstance(value, list) else value[step]
            yield value

    def _refuse_other_base(self, path: Path) -> None:
        for depth, value in enumerate(self._along(path)):
            base = value.get("$id") if depth and isinstance(value, Mapping) else None
            if isinstance(base, str) and not base.startswith("#"):
                raise refused(
                    (*path[:depth], "$id"), "changes where references in it lead: leave it out"
                )


def all_values(value: Any) -> Iterator[Any]:
    """Yields a value and all values inside it, however deep it is nested."""
    waiting = [value]
    while waiting:
        yield (value := waiting.pop())
        if isinstance(value, _OBJECT):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def subschemas_of(root: Schema, definitions: tuple[str, ...] = ()) -> Iterator[Part]:
    """Yields the root and the schemas inside it; references are not followed."""
    waiting = [Part((), root)]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += reversed(children(part, definitions))


def children(part: Part, definitions: tuple[str, ...] = ()) -> list[Part]:
    """Returns the schemas directly inside this one. Values of a wrong type are ignored (see
    check.py)."""
    path, schema = part
    parts: list[Part] = []
    for key, value in () if isinstance(schema, bool) else schema.items():
        shape = _SHAPES.get(key)
        if shape is None or (shape is DEFINITIONS and key not in definitions):
            continue
        if isinstance(value, list):
            if shape is LISTED or key == "items":
                at = enumerate(value)
                parts += [
                    Part((*path, key, str(n)), one) for n, one in at if isinstance(one, _SCHEMA)
                ]
        elif shape is SINGLE:
            if isinstance(value, _SCHEMA):
                parts.append(Part((*path, key), value))
        elif shape is not LISTED and isinstance(value, _OBJECT):
            named = value.items()
            parts += [
                Part((*path, key, str(n)), one) for n, one in named if isinstance(one, _SCHEMA)
            ]
    return parts


def flattened(start: Part, view: View, keywords: Sequence[str] = ("allOf",)) -> Iterator[Part]:
    """Yields this schema, the target of its `$ref`, the schemas of its `allOf`, and theirs in
    turn. What is not as JSON Schema has it is passed over."""
    waiting, ids = deque([start]), set[int]()
    while waiting:
        path, schema = part = waiting.popleft()
        if isinstance(schema, Mapping) and id(schema) not in ids:
            ids.add(id(schema))
            yield part
            target = view.referred(schema)
            waiting += [target] if target else []
            for key in keywords:
                options = schema.get(key)
                if isinstance(options, list):
                    waiting += [Part((*path, key, str(n)), one) for n, one in enumerate(options)]


def required_by(schema: Schema) -> list[str]:
    names = schema.get("required") if isinstance(schema, Mapping) else ()
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def properties_in(schema: Schema) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _anchors_of(schema: Schema) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    for key in ("$anchor", "$dynamicAnchor"):
        if isinstance(schema.get(key), str):
            yield schema[key]
    for key in ("$id", "id"):
        if isinstance(schema.get(key), str) and schema[key].startswith("#"):
            yield schema[key][1:]


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def remote_reference(schema: Mapping[str, Any]) -> str | None:
    """Returns a reference that leads out of the schema, even from a keyword that is not known
    here."""
    for value in all_values(schema):
        targets = [value.get(key) for key in _REFERENCES] if isinstance(value, _OBJECT) else []
        for target in targets:
            if isinstance(target, str) and not target.startswith("#"):
                return target
    return None


def pointer(path: Path) -> str:
    return "/".join(["#", *(step.replace("~", "~0").replace("/", "~1") for step in path)])


@lru_cache(1024)
def reference(path: Path) -> str:
    return quote(pointer(path), safe="#/~!$&'()*+,;=:@")


def shorten(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except (RecursionError, ValueError):
        return f"this {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def refused(path: Path, why: str) -> InvalidGrammar:
    at = pointer(path)
    at = at if len(at) <= 200 else f"{at[:120]}...{at[-77:]}"
    return InvalidGrammar(f"The schema can't be used: {at} {why}.")


ALL = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})

ALIASES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
"""Python's names of types, which tools made from signatures have by mistake."""


def type_of(value: Any) -> str:
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


def named(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types in the schema's own `type`, where every integer is a number; all types if
    it has none."""
    named_types = schema.get("type")
    names = named_types if isinstance(named_types, list) else [named_types]
    types = frozenset(name for name in names if isinstance(name, str)) & ALL
    return (types | {"integer"} if "number" in types else types) or ALL


def types_of(schema: Mapping[str, Any], view: View) -> frozenset[str]:
    """Returns the types that a schema, a part of `view`, allows by itself and through its
    references."""
    return _Types(view).of(schema, limits.COERCED_DEPTH)


def resolved(schema: Mapping[str, Any], view: View) -> Mapping[str, Any]:
    """Returns the schema at the end of its references; an empty one if they lead nowhere."""
    for _ in range(limits.COERCED_DEPTH):
        if not isinstance(schema.get("$ref"), str):
            return schema
        target = view.referred(schema)
        if not target or isinstance(target.schema, bool):
            return {}
        schema = target.schema
    return {}


def listed(schema: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Returns the schemas of `allOf`, `anyOf` or `oneOf`, up to the limit."""
    options = schema.get(key)
    some = options[: limits.COERCED_PARTS] if isinstance(options, list) else []
    return [option if isinstance(option, Mapping) else {} for option in some]


class _Types:
    def __init__(self, view: View) -> None:
        self._view = view
        self._known: dict[int, frozenset[str]] = {}

    def of(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        schema = resolved(schema, self._view)
        if not depth or len(self._known) > limits.COERCED_PARTS:
            return ALL
        if id(schema) not in self._known:
            types = self._known[id(schema)] = ALL  # a schema that refers to itself adds nothing
            for allowed in self._constraints(schema, depth - 1):
                types &= allowed
            self._known[id(schema)] = types or ALL
        return self._known[id(schema)]

    def _constraints(self, schema: Mapping[str, Any], depth: int) -> Iterator[frozenset[str]]:
        types = schema.get("type")
        yield named({"type": ALIASES.get(types, types) if isinstance(types, str) else types})
        for key in ("anyOf", "oneOf"):
            if options := listed(schema, key):
                yield frozenset().union(*(self.of(option, depth) for option in options))
        for part in listed(schema, "allOf"):
            yield self.of(part, depth)
        values = schema.get("enum")
        if isinstance(values, list) and values:
            yield frozenset(map(type_of, values))
        if "const" in schema:
            yield frozenset({type_of(schema["const"])})
