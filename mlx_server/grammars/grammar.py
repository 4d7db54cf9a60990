"""A schema as llguidance gets it: without keywords that a grammar can't enforce, each of which is
reported with its path, and with references as JSON pointers.

`propertyNames` is written as a pattern of properties.
https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import patterns
from mlx_server.grammars.view import (
    HOLDERS,
    Part,
    Path,
    Schema,
    View,
    all_values,
    named,
    pointer,
    reference,
    refused,
)

NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""The keywords that constrain numbers alone."""

EXACT = 2**53
"""Larger integers may equal their neighbours as doubles, in which llguidance compares them."""
_SMALLEST = dict.fromkeys(NUMERIC, 1e-60) | {"multipleOf": 1e-9}
"""The smallest numbers that llguidance can write as patterns."""


_SAYS_NOTHING = frozenset(("type", "title", "description"))
_OTHERS = ("properties", "patternProperties", "unevaluatedProperties")
_NAME_COUNTS = ("minProperties", "maxProperties")


def names_pattern(view: View, part: Part) -> str | None:
    """Returns a pattern of the names of an object's members, as `propertyNames` says them; None
    where `patternProperties` can't take its place."""
    path, schema = part
    if isinstance(schema, bool) or "propertyNames" not in schema:
        return None
    if any(schema.get(key) for key in _OTHERS) or any(key in schema for key in _NAME_COUNTS):
        return None
    at, inner = (*path, "propertyNames"), (*path, "additionalProperties")
    if not view.referred_places.isdisjoint((at, inner)):
        return None
    names = schema["propertyNames"]
    if not isinstance(names, bool) and names.keys() == {"$ref"}:
        target = view.target(Part(at, names))
        names = target.schema if target else True
    if isinstance(names, bool) or names.get("type", "string") != "string":
        return None
    match {key: value for key, value in names.items() if key not in _SAYS_NOTHING}:
        case {"pattern": str(pattern), **more} if not (more or patterns.unsupported(pattern)):
            return pattern
        case {"const": value, **more} if not more:
            return _one_of([value])
        case {"enum": list(values), **more} if not more:
            return _one_of(values)
    return None


def _one_of(names: list[Any]) -> str | None:
    texts = [re.escape(name) for name in names if isinstance(name, str)]
    pattern = f"^({'|'.join(texts)})$"
    return pattern if texts and len(pattern) <= limits.PATTERN_CHARACTERS else None


def match_names(schema: dict[str, Any], pattern: str) -> None:
    """Writes the pattern of all names as a pattern of properties."""
    inner: Schema = schema.pop("additionalProperties", True)
    schema["patternProperties"] = {patterns.as_rust(pattern): inner}
    schema["additionalProperties"] = False
    del schema["propertyNames"]


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
    visits = set()
    while waiting:
        now = waiting.pop()
        if (now.part.path, now.joined) in visits:
            continue
        visits.add((now.part.path, now.joined))
        yield now
        waiting += reversed(_visits_from(view, now))


def _visits_from(view: View, visited: Visited) -> list[Visited]:
    (path, schema), joined = visited
    links, at = view.links(visited.part), len(path)
    if isinstance(schema, bool) or not (links.used or links.target):
        return []
    merged = _merged(schema, joined=joined)
    visits = [
        Visited(part, joined or part.path[at] in merged)
        for part in links.used
        if part.path[at] not in _UNSUPPORTED
    ]
    return [*visits, Visited(links.target, "$ref" in merged)] if links.target else visits


def _merged(schema: Mapping[str, Any], *, joined: bool) -> frozenset[str]:
    """Returns the keywords whose schemas constrain the same value as others do."""
    keywords = _IN_PLACE.intersection(schema)
    if not keywords or joined or len(_constraints(schema)) > 1:
        return keywords
    return keywords if len(schema.get("allOf", ())) > 1 else _NONE


_NONE = frozenset[str]()


def _constraints(schema: Mapping[str, Any]) -> set[str]:
    return {key for key in schema if key not in ANNOTATIONS and not is_vacuous(schema, key)}


def unsupported_keywords(view: View) -> list[UnsupportedKeyword]:
    costs = _Costs()
    keywords: dict[UnsupportedKeyword, None] = {}
    for now in visited(view):
        if isinstance(now.part.schema, bool) or _REPORTED.isdisjoint(now.part.schema):
            continue
        keywords |= dict.fromkeys(_unsupported_of(now, view))
        keywords |= dict.fromkeys(costs.unsupported_keywords(now))
    return list(keywords)


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


def _unsupported_of(visited: Visited, view: View) -> Iterator[UnsupportedKeyword]:
    path, schema = visited.part
    assert isinstance(schema, Mapping)
    for key in schema:
        if key not in _REPORTED:
            continue
        if key in _UNSUPPORTED and not is_vacuous(schema, key):
            # at the root, a format that writes a call's arguments one by one takes any names
            if key != "propertyNames" or not path or names_pattern(view, visited.part) is None:
                yield UnsupportedKeyword(path, key)
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
        elif key in _OUTWARDS and _nearer_bound(schema, key) is not None:
            continue
        elif key in NUMERIC and not _is_exact(key, schema[key]):
            yield UnsupportedKeyword(
                path, key, f"is {schema[key]}, which is too large or too small to be compared"
            )
        elif key in ("const", "enum") and _has_large_integer(schema[key]):
            yield UnsupportedKeyword(
                path, key, "has an integer beyond 2^53, which is not compared exactly"
            )


_REPORTED = _UNSUPPORTED.union(
    NUMERIC,
    ("const", "enum"),
    ("minProperties", "maxProperties", "format", "pattern", "patternProperties"),
)
"""The keywords of which some uses are reported."""


def _is_exact(key: str, value: float) -> bool:
    return not value or _SMALLEST[key] <= abs(value) <= _largest(key)


def _largest(key: str) -> int:
    """An integer next to an exclusive bound is compared too."""
    return EXACT - key.startswith("exclusive")


def _nearer_bound(schema: Mapping[str, Any], key: str) -> int | None:
    """Returns the bound that stands for one of integers far from zero, such as int64's: integers
    beyond 2^53 are excluded, since few readers of JSON have them. None for any other bound."""
    outwards = _OUTWARDS.get(key, 0)
    if "number" in named(schema) or outwards * schema[key] <= _largest(key):
        return None
    return outwards * _largest(key)


_OUTWARDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}


def _has_large_integer(value: Any) -> bool:
    return any(isinstance(each, int) and abs(each) > EXACT for each in all_values(value))


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


SPACE = r"\x20|\n(\x20{0,40}|\x09{0,10})"
"""The white space between the parts of JSON. It is bounded, because a small model may otherwise
write blanks until it reaches its token limit."""

JSON = {"whitespace_pattern": SPACE, "coerce_one_of": True}
"""llguidance's options. It reads `oneOf` as `anyOf`; the child reports those that may overlap."""

ESCAPES = 'nrbtf\\"'


def text_of(schema: Schema) -> str:
    """Returns the schema as llguidance gets it, as JSON."""
    view = View(json.loads(json.dumps(schema)))
    return simplified_text(view, unsupported_keywords(view))


def simplified_text(view: View, unsupported: Iterable[UnsupportedKeyword]) -> str:
    """Returns a view's schema as JSON, simplified in place. unsupported: what a grammar
    can't enforce."""
    simplify(view, unsupported)
    if view.root is False:
        return "false"
    members = view.root if isinstance(view.root, dict) else {}
    # with \u the model could write a listed property's name in a form that avoids its schema
    escapes = {"json_allowed_escapes": ESCAPES if _may_spell(view) else ESCAPES + "u"}
    return json.dumps({**members, "x-guidance": JSON | escapes})


def simplify(view: View, unsupported: Iterable[UnsupportedKeyword]) -> None:
    """Leaves pointers as the only references, and takes out keywords that constrain nothing or that
    are unsupported.

    Every `oneOf` stays where it is: references may point into it, and it is read as `anyOf`.
    """
    if isinstance(view.root, dict):
        view.root.pop("x-guidance", None)
    dropped: dict[Path, set[str]] = {}
    for path, keyword, _ in unsupported:
        dropped.setdefault(path, set()).add(keyword)
    parts = [
        (part, view.links(part).target, names_pattern(view, part))
        for part in view.reached()
        if isinstance(part.schema, dict)
        and (part.path in dropped or not _SIMPLIFIED.isdisjoint(part.schema))
    ]
    changed = False
    for (path, schema), target, pattern in parts:
        assert isinstance(schema, dict)
        if pattern is not None:
            match_names(schema, pattern)
        removed = _simplify(schema, dropped.get(path, _NOTHING))
        changed = changed or not HOLDERS.isdisjoint(removed)
        changed = changed or pattern is not None
        if target:
            schema["$ref"] = reference(target.path)
    if changed:
        view.forget()


Keywords = frozenset[str] | set[str]
_NOTHING = frozenset[str]()
_COUNTS = frozenset(COUNTS)
_SIMPLIFIED = DROPPABLE.union(_COUNTS, _OUTWARDS, ("pattern", "$ref", "propertyNames"))
"""The keywords of which some uses are written in another way, or left out."""


def _simplify(schema: dict[str, Any], dropped: Keywords) -> Keywords:
    """Returns the keywords that it has removed."""
    idle = DROPPABLE.intersection(schema)
    removed = dropped.union(key for key in idle if key in IDLE or is_vacuous(schema, key))
    for key in removed:
        schema.pop(key, None)
    for key in _COUNTS.intersection(schema):
        schema[key] = int(schema[key])
    for key in _OUTWARDS.keys() & schema:
        schema[key] = _nearer_bound(schema, key) or schema[key]
    if "pattern" in schema:
        schema["pattern"] = patterns.as_rust(schema["pattern"])
    return removed


def _may_spell(view: View) -> bool:
    """Whether an object with listed properties also allows members of any other name."""
    named = ("properties", "required", "patternProperties")
    return any(
        isinstance(schema, dict) and any(schema.get(key) for key in named) and not is_closed(schema)
        for _, schema in view.reached()
    )
