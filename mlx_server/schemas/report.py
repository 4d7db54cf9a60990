"""Finds the keywords of a schema that a grammar can't enforce, each with its path.

They are left out of the grammar (see grammar.py). Anything else that llguidance refuses is refused.
https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.schemas import patterns
from mlx_server.schemas.bounds import EXACT, NUMERIC, wide_bound
from mlx_server.schemas.property_names import listed_names, names_pattern
from mlx_server.schemas.types import named
from mlx_server.schemas.view import (
    Part,
    Path,
    View,
    pointer,
    refused,
)

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    )
)
IDLE = ("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary")
"""Keywords that llguidance knows and that constrain nothing once references are pointers."""
_IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly"),
        *("writeOnly", "contentMediaType", "contentEncoding", "contentSchema"),
        *("$defs", "definitions", *IDLE),
    )
)
COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)


class UnsupportedKeyword(NamedTuple):
    path: Path
    """The path of the schema that has the keyword."""
    keyword: str
    why: str = "can't be enforced by a grammar"

    def __str__(self) -> str:
        return f"{self.keyword} at {pointer(self.path)}"

    def refusal(self) -> InvalidGrammar:
        return refused(
            (*self.path, self.keyword), f"{self.why}: leave it out, or set strict to false"
        )


class Visited(NamedTuple):
    part: Part
    joined: bool
    """Whether other schemas may constrain the same value, so that llguidance has to merge them."""


def visited(view: View) -> Iterator[Visited]:
    """Yields the schemas that constrain a value. One that is used both joined and alone comes
    twice."""
    waiting = [Visited(Part((), view.root), False)]
    seen = set()
    while waiting:
        now = waiting.pop()
        if (now.part.path, now.joined) in seen:
            continue
        seen.add((now.part.path, now.joined))
        yield now
        waiting += reversed(_visits_from(view, now))


def _visits_from(view: View, visited: Visited) -> list[Visited]:
    (path, schema), joined = visited
    links, at = view.links(visited.part), len(path)
    if isinstance(schema, bool) or not (links.used or links.target):
        return []
    merged = _merged(schema, joined=joined)
    found = [
        Visited(part, joined or part.path[at] in merged)
        for part in links.used
        if part.path[at] not in _UNSUPPORTED
    ]
    return [*found, Visited(links.target, "$ref" in merged)] if links.target else found


def _merged(schema: Mapping[str, Any], *, joined: bool) -> frozenset[str]:
    """Returns the keywords whose schemas constrain the same value as others do."""
    found = _IN_PLACE.intersection(schema)
    if not found or joined or len(_constraints(schema)) > 1:
        return found
    return found if len(schema.get("allOf", ())) > 1 else _NONE


_NONE = frozenset[str]()


def _constraints(schema: Mapping[str, Any]) -> set[str]:
    return {key for key in schema if key not in ANNOTATIONS and not is_vacuous(schema, key)}


Disjoint = Callable[[list[Part]], bool]
"""Tests whether no value can follow two of the options of a `oneOf`."""


def unsupported_keywords(
    view: View, disjoint: Disjoint = lambda options: True
) -> list[UnsupportedKeyword]:
    """disjoint: by default all options count as disjoint, since the grammar is the same either
    way."""
    known: dict[Path, bool] = {}

    def once(options: list[Part]) -> bool:
        path = options[0].path
        if path not in known:
            known[path] = disjoint(options)
        return known[path]

    costs = _Costs()
    found: dict[UnsupportedKeyword, None] = {}
    for now in visited(view):
        if isinstance(now.part.schema, bool) or _REPORTED.isdisjoint(now.part.schema):
            continue
        found |= dict.fromkeys(_unsupported_of(now, once, view))
        found |= dict.fromkeys(costs.unsupported_keywords(now))
    return list(found)


class _Costs:
    """Finds keywords that llguidance supports but that cost too much while an answer is decoded.

    It is better not to enforce them than to refuse the schema.
    """

    def __init__(self) -> None:
        self._joined_patterns = 0
        self._choices = 0

    def unsupported_keywords(self, visited: Visited) -> Iterator[UnsupportedKeyword]:
        path, schema = visited.part
        assert isinstance(schema, Mapping)
        for key in ("pattern", "format"):
            self._joined_patterns += visited.joined and key in schema
            if key in schema and self._joined_patterns > limits.SCHEMA_JOINED_PATTERNS:
                yield UnsupportedKeyword(
                    path, key, "is one of too many that allOf, anyOf or $ref may join"
                )
        for key in ("minProperties", "maxProperties"):
            if key in schema and not is_vacuous(schema, key):
                self._choices += len(schema.get("properties", ())) ** 2
                if self._choices > limits.SCHEMA_CHOICES:
                    yield UnsupportedKeyword(path, key, "is too costly with so many properties")


def _unsupported_of(
    visited: Visited, disjoint: Disjoint, view: View
) -> Iterator[UnsupportedKeyword]:
    path, schema = visited.part
    assert isinstance(schema, Mapping)
    for key in schema:
        if key not in _REPORTED:
            continue
        if key in _UNSUPPORTED and not is_vacuous(schema, key):
            # at the root, a format that writes a call's arguments one by one takes any names
            if key != "propertyNames" or not path or not _says_names(view, visited.part):
                yield UnsupportedKeyword(path, key)
        elif key == "oneOf":
            options = [Part((*path, key, str(at)), one) for at, one in enumerate(schema[key])]
            if not disjoint(options):
                yield UnsupportedKeyword(
                    path, key, "has options that may overlap (anyOf takes them)"
                )
        elif key in ("minProperties", "maxProperties") and not _countable(
            schema, key, visited.joined
        ):
            yield UnsupportedKeyword(path, key, "can't be enforced in this shape")
        elif key == "format" and "string" in named(schema) and schema[key] not in FORMATS:
            yield UnsupportedKeyword(path, key, f"is not one of {', '.join(sorted(FORMATS))}")
        elif key == "pattern" and (why := patterns.unsupported(schema[key])):
            yield UnsupportedKeyword(path, key, f"has {why}, which a grammar can't express")
        elif key == "patternProperties":
            yield from _unsupported_patterns(path, schema)
        elif wide_bound(schema, key) is not None:
            continue
        elif key in _EXCLUSIVE and abs(schema[key]) >= EXACT and _of_integers(visited):
            yield UnsupportedKeyword(
                path, key, "excludes an integer from 2^53 on, which is not compared exactly"
            )
        elif key in _NUMERIC and _inexact(schema[key]):
            yield UnsupportedKeyword(
                path, key, "has an integer beyond 2^53, which is not compared exactly"
            )
        elif key in _SMALLEST and _out_of_reach(schema[key], _SMALLEST[key]):
            yield UnsupportedKeyword(
                path, key, f"is {schema[key]}, which is too large or too small for a grammar"
            )


_NUMERIC = frozenset(("const", "enum", *NUMERIC))


_REPORTED = _NUMERIC.union(
    _UNSUPPORTED,
    ("oneOf", "minProperties", "maxProperties", "format", "pattern", "patternProperties"),
)
"""The keywords of which some uses are reported."""


def _says_names(view: View, part: Part) -> bool:
    return listed_names(view, part) is not None or names_pattern(view, part) is not None


_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")


def _of_integers(visited: Visited) -> bool:
    schema = visited.part.schema
    return visited.joined or isinstance(schema, bool) or "number" not in named(schema)


_LARGEST = 1e17
_SMALLEST = dict.fromkeys(NUMERIC, 1e-60) | {"multipleOf": 1e-9}
"""Bounds of the numbers that llguidance can write as patterns."""


def _out_of_reach(value: float, smallest: float) -> bool:
    return bool(value) and not smallest <= abs(value) <= _LARGEST


def _inexact(value: Any) -> bool:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case bool() | str() | None:
                pass
            case int() | float() as number:
                if abs(number) > EXACT and not isinstance(number, float):
                    return True
            case list() as items:
                waiting += items
            case dict() as members:
                waiting += members.values()
    return False


def _unsupported_patterns(path: Path, schema: Mapping[str, Any]) -> Iterator[UnsupportedKeyword]:
    why = next(filter(None, map(patterns.unsupported, schema["patternProperties"])), None)
    if why:
        yield UnsupportedKeyword(
            path, "patternProperties", f"has {why}, which a grammar can't express"
        )
        if "additionalProperties" in schema:
            yield UnsupportedKeyword(
                path, "additionalProperties", "can't be distinguished from patternProperties"
            )


def _countable(schema: Mapping[str, Any], key: str, joined: bool) -> bool:
    """Whether llguidance can count the members.

    Names that the schema does not list may be repeated, so at most one of them can be required.
    """
    if is_vacuous(schema, key) or "object" not in named(schema):
        return True
    if joined or not _IN_PLACE.isdisjoint(schema):
        return False
    required = set(schema.get("required", ()))
    least = max(0, schema.get("minProperties", 0) - len(required))
    most = schema.get("maxProperties")
    if set(schema.get("properties", ())) <= required:
        return least <= 1 or is_closed(schema)
    return is_closed(schema) and least <= 1 and most in (None, len(required) + 1)


def is_closed(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


_MAY_BE_VACUOUS = frozenset(
    (
        *(key for key in _UNSUPPORTED if not key.startswith("$")),
        *("patternProperties", "additionalItems", "minProperties", "maxProperties"),
    )
)


DROPPABLE = _MAY_BE_VACUOUS.union(IDLE)
"""Keywords of which some or all uses constrain nothing."""


def is_vacuous(schema: Mapping[str, Any], key: str) -> bool:
    """Whether the keyword constrains nothing in this schema."""
    if key not in _MAY_BE_VACUOUS:
        return False
    value = schema[key]
    match key:
        case "uniqueItems" | "not":
            return value is False
        case "unevaluatedItems" | "unevaluatedProperties":
            return value in (True, {})
        case "propertyNames":
            return value in (True, {}, {"type": "string"})
        case "dependentRequired" | "dependentSchemas" | "dependencies" | "patternProperties":
            return value in ({},)
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "additionalItems":
            return not isinstance(schema.get("items"), list)
        case "minProperties":
            return len(set(schema.get("required", ()))) >= float(value)
        case "maxProperties":
            names = {*schema.get("properties", ()), *schema.get("required", ())}
            return is_closed(schema) and len(names) <= float(value)
    return False
