"""Recognises schemas of which llguidance is known to take every part.

Their grammar is compiled once, by the engine. That of any other schema is compiled before, in a
process that can be ended, so that what llguidance refuses is refused with its path.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server.schemas.bounds import EXACT
from mlx_server.schemas.check import METASCHEMA
from mlx_server.schemas.patterns import written_out
from mlx_server.schemas.report import ANNOTATIONS, FORMATS
from mlx_server.schemas.types import named
from mlx_server.schemas.view import Part, Schema, View, children

MOST_PARTS = 2000
MOST_JOINED = 16
"""The most schemas that may be joined to one."""
MOST_COPIED = 3000
"""The most parts of joined schemas: llguidance reads each again wherever it is joined."""
DEEPEST = 64
"""The most schemas within each other that are followed through those that they join."""
LONGEST = 256
"""The largest number of characters or items that may be asked for."""
LARGEST_PATTERNS = 2000
"""The most characters of all patterns, with their repetitions written out."""

_CONSTRAINTS = frozenset((*METASCHEMA, "$ref", "const", "format", "x-guidance")) - ANNOTATIONS
_CONTAINERS = frozenset(
    ("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems")
)
_VALUES = frozenset(("type", "enum", "const"))
_LENGTHS = ("minLength", "maxLength")
_COUNTS = ("minItems", "maxItems")
_BOUNDS = ("minimum", "maximum")
_RANGES = ((_LENGTHS, LONGEST), (_COUNTS, LONGEST), (_BOUNDS, EXACT))
_OF_TYPES = _CONTAINERS.union(_LENGTHS, _BOUNDS)
"""Keywords of which each constrains values of one type, so that none contradicts another's."""
_BOUNDED_CHOICE = frozenset(("anyOf", *_BOUNDS))
_JOINED = frozenset(("type", "properties", "required", "allOf", "$ref"))
_CLASSES = {"string": str, "integer": int, "boolean": bool, "null": type(None)}

_CHARACTER = (
    r"[\w :,;@#%&<>~='/-]|\\[dwsDWS.\-/+*?()\[\]{}^$|\\]|\.|\[\^?(?:[\w .,:@+*#-]|\\[dws.\-/])+\]"
)
_TIMES = r"(?:[*+?]|\{[0-9]{1,3}(?:,[0-9]{0,3})?\})?"
_PIECE = rf"(?:{_CHARACTER}){_TIMES}"
_GROUP = rf"\((?:\?:)?(?:{_PIECE})+(?:\|(?:{_PIECE})+)*\){_TIMES}"
_PLAIN_PATTERN = re.compile(rf"\^?(?:{_PIECE}|{_GROUP})+\$?")
"""Patterns that some text matches, with anchors at their ends alone."""


def is_plain(view: View) -> bool:
    schemas = [part.schema for part in view.reached()]
    if len(schemas) > MOST_PARTS:
        return False
    objects = [schema for schema in schemas if not isinstance(schema, bool)]
    closed = sum(schema.get("additionalProperties") is False for schema in objects)
    if schemas.count(False) > closed:  # a value is required to be nothing
        return False
    if not all(_can_be_met(schema, _CONSTRAINTS.intersection(schema)) for schema in objects):
        return False
    if sum(_written_out(schema) for schema in objects if "pattern" in schema) > LARGEST_PATTERNS:
        return False
    joined = {id(schema): _joined(view, schema) for schema in objects if "allOf" in schema}
    if not all(map(_can_be_joined, joined.values())):
        return False
    size = _Sizes(view, joined)
    return sum(size.of(schema) for schema in objects if "allOf" in schema) <= MOST_COPIED


class _Sizes:
    """How many parts llguidance reads for a schema: those of joined schemas once wherever they are
    joined, which multiplies if they have such members too."""

    def __init__(self, view: View, joined: Mapping[int, list[Mapping[str, Any]]]) -> None:
        """joined: what each schema joins, by its id."""
        self._view = view
        self._joined = joined
        self._known: dict[int, float] = {}

    def of(self, schema: Schema | None, depth: int = 0) -> float:
        at = id(schema)
        if at not in self._known:
            self._known[at] = math.inf  # if it leads to itself
            if depth <= DEEPEST:
                self._known[at] = 1 + sum(self.of(one, depth + 1) for one in self._inside(schema))
        return self._known[at]

    def _inside(self, schema: Schema | None) -> Iterator[Schema | None]:
        joined = self._joined.get(id(schema))
        parts: list[Schema] = [*joined] if joined else [schema or True]
        for part in parts:
            for path, inner in children(Part((), part)):
                if path[0] != "allOf":
                    yield inner
                    if joined and isinstance(inner, Mapping) and "$ref" in inner:
                        yield self._view.referred(inner)  # a member may be joined too


def _written_out(schema: Mapping[str, Any]) -> float:
    size = written_out(schema["pattern"])
    return math.inf if isinstance(size, str) else size


def _can_be_met(schema: Mapping[str, Any], keys: frozenset[str]) -> bool:
    """Whether some value conforms to these keywords of the schema, and llguidance knows it."""
    if len(keys) <= 1 and keys <= {"$ref", "anyOf", "oneOf"}:
        return True
    if keys <= _OF_TYPES:
        return _has_room(schema, keys)
    kind = schema.get("type")
    if keys == {"type", "format"}:
        return kind == "string" and schema["format"] in FORMATS
    if keys == {"type", "pattern"}:
        return kind == "string" and bool(_PLAIN_PATTERN.fullmatch(schema["pattern"]))
    if "anyOf" in keys and keys <= _BOUNDED_CHOICE:
        return _in_order(schema, _BOUNDS, EXACT) and all(map(_is_unbounded, schema["anyOf"]))
    if keys <= _VALUES:
        return len(keys & {"enum", "const"}) == 1 and _are_of(schema, kind)
    return "allOf" in keys and keys <= _JOINED  # see _can_be_joined


def _is_unbounded(option: Any) -> bool:
    return isinstance(option, Mapping) and _CONSTRAINTS.intersection(option) <= _CONTAINERS


def _has_room(schema: Mapping[str, Any], keys: frozenset[str]) -> bool:
    """Whether the bounds leave room, and what is required may be there."""
    return (
        all(_in_order(schema, pair, most) for pair, most in _RANGES if not keys.isdisjoint(pair))
        and isinstance(schema.get("items", {}), (dict, bool))
        and (
            schema.get("additionalProperties") is not False
            or set(schema.get("required", ())) <= set(schema.get("properties", ()))
        )
    )


def _joined(view: View, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the schema, those of its `allOf` and of its `$ref`, and theirs in turn; none at all
    if they are not known or too many."""
    found, waiting = list[Mapping[str, Any]](), list[Any]([schema])
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or len(found) == MOST_JOINED:
            return []
        found.append(part)
        waiting += part.get("allOf", ())
        if "$ref" in part:
            waiting.append(view.referred(part))
    return found


def _can_be_joined(parts: list[Mapping[str, Any]]) -> bool:
    """Whether some object conforms to all of these, and llguidance knows it: of a member that
    several describe, only one may say more than its types."""
    members = defaultdict[str, list[Any]](list)
    for part in parts:
        if not _CONSTRAINTS.intersection(part) <= _JOINED or part.get("type", "object") != "object":
            return False
        for name, member in part.get("properties", {}).items():
            members[name].append({} if member is True else member)
    return bool(parts) and all(_agree(each) for each in members.values() if len(each) > 1)


def _agree(members: list[Any]) -> bool:
    telling = [member for member in members if not _CONSTRAINTS.intersection(member) <= {"type"}]
    if len(telling) > 1:
        return False
    kinds = frozenset.intersection(*(named(each) for each in members if each not in telling))
    return named(telling[0]) <= kinds if telling else bool(kinds)


def _in_order(schema: Mapping[str, Any], keys: tuple[str, str], largest: int) -> bool:
    """Whether the bounds that there are leave room between them."""
    known = [schema[key] for key in keys if key in schema]
    exact = all(type(each) is int and abs(each) <= largest for each in known)
    return exact and known == sorted(known)


def _are_of(schema: Mapping[str, Any], kind: object) -> bool:
    """Whether the values that are listed are of the types that are listed."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    kinds = kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else _CLASSES
    classes = {_CLASSES[each] for each in kinds if each in _CLASSES}
    return all(type(value) in classes and _is_exact(value) for value in values)


def _is_exact(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) <= EXACT
