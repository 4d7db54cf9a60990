"""Refuses what is not a JSON Schema, and schemas that are too large, before they are compiled.

llguidance limits the work of compiling a schema itself, and refuses what takes more. The exception
is `multipleOf`, whose cost appears only while an answer is decoded. `readable` is for schemas of
tools that are not quite JSON Schema, such as `properties: []`: what can't be read is left out.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import patterns
from mlx_server.grammars.grammar import COUNTS, visited
from mlx_server.grammars.view import (
    ALIASES,
    ALL,
    DEFINITIONS,
    LISTED,
    NAMED,
    SINGLE,
    Part,
    Path,
    View,
    pointer,
    refused,
    shorten,
    subschemas_of,
)

_SCHEMA = {"type": ["object", "boolean"]}
_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_COUNT = {"type": "integer", "minimum": 0, "maximum": limits.SCHEMA_COUNT}
_NAMES: dict[str, Any] = {"type": "array", "items": _TEXT}
_TYPE = {"enum": ["array", "boolean", "integer", "null", "number", "object", "string"]}
_TYPES = frozenset(_TYPE["enum"])

TEXTS = ("pattern", "format", "$anchor", "$dynamicRef", "$recursiveRef")
_BY_SHAPE: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    ((*NAMED, *DEFINITIONS), {"type": "object", "additionalProperties": _SCHEMA}),
    (LISTED, {"type": "array", "items": _SCHEMA, "minItems": 1}),
    (SINGLE, _SCHEMA),
    (tuple(key for key in COUNTS if key != "maxLength"), _COUNT),
    (TEXTS, _TEXT),
    (("minimum", "maximum"), _NUMBER),
    (("exclusiveMinimum", "exclusiveMaximum"), {"type": ["number", "boolean"]}),
)
METASCHEMA = {key: shape for keys, shape in _BY_SHAPE for key in keys} | {
    "properties": {
        "type": "object",
        "additionalProperties": _SCHEMA,
        "maxProperties": limits.SCHEMA_PROPERTIES,
    },
    "items": {"type": ["object", "boolean", "array"], "items": _SCHEMA},
    "maxLength": {"type": "integer", "minimum": 0, "maximum": limits.SCHEMA_TEXT_LENGTH},
    "multipleOf": {"type": "number", "exclusiveMinimum": 0},
    "type": {"if": _TEXT, "then": _TYPE, "else": {"type": "array", "items": _TYPE, "minItems": 1}},
    "required": {**_NAMES, "maxItems": limits.SCHEMA_PROPERTIES},
    "enum": {"type": "array", "minItems": 1, "maxItems": limits.SCHEMA_VALUES},
    "dependentRequired": {"type": "object", "additionalProperties": _NAMES},
    "dependencies": {"type": "object"},
    "uniqueItems": {"type": "boolean"},
}
"""The values that keywords may have. The published metaschema is not used: `jsonschema` takes ten
times as long with it, because it refers to itself dynamically at every level."""


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator  # late, as it would delay the server's start

    return Draft202012Validator({"properties": METASCHEMA})


def written(schema: Any) -> str:
    """Returns the schema as JSON. Raises InvalidGrammar if it is not a schema, or is too long."""
    if not isinstance(schema, (Mapping, bool)):
        raise refused((), f"must be an object or a boolean, not {shorten(schema)}")
    try:
        text = json.dumps(schema, ensure_ascii=False)
        size = len(text.encode())
    except UnicodeEncodeError:
        raise refused((), "has half of a surrogate pair in a text") from None
    except RecursionError:
        raise refused((), f"is nested deeper than {limits.SCHEMA_DEPTH} levels") from None
    if size > limits.SCHEMA_BYTES:
        raise refused((), f"has {size} bytes, more than {limits.SCHEMA_BYTES}")
    return text


def check(view: View) -> None:
    """Raises InvalidGrammar if this is not a JSON Schema, or if no value can conform to it."""
    if view.root is False:
        raise refused((), "is false, which allows no value")
    parts = list(view.all())
    for part in parts:
        _check_shape(part)
    _refuse_cycles(view, parts)
    for part in parts:
        _check_values(part)
    _check_multiples(view, parts)


def measure(schema: Any) -> None:
    """Raises InvalidGrammar if the schema has too many parts, or numbers that JSON can't express.

    It does not recurse, because a schema may be nested as deeply as its text allows."""
    if _is_small(schema):
        return
    waiting: list[tuple[Any, Path]] = [(schema, ())]
    nodes = 0
    while waiting:
        value, path = waiting.pop()
        if isinstance(value, (Mapping, list)):
            nodes += 1
            if nodes > limits.SCHEMA_NODES:
                raise refused((), f"has more than {limits.SCHEMA_NODES} objects and arrays in it")
            if len(path) > limits.SCHEMA_DEPTH:
                raise refused(path, f"is nested deeper than {limits.SCHEMA_DEPTH} levels")
            inner = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting += [(item, (*path, str(key))) for key, item in inner]
        elif isinstance(value, (int, float)) and not _is_finite(value):
            raise refused(path, "is a number too large for any JSON reader")


def _is_small(schema: Any) -> bool:
    """Whether the schema is within all limits of `measure`: this is known sooner, as it needs no
    paths."""
    waiting, nodes = [(schema, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        nodes += 1
        if nodes > limits.SCHEMA_NODES or depth > limits.SCHEMA_DEPTH:
            return False
        inner = value.values() if type(value) is dict else value if type(value) is list else None
        if inner is None:
            return type(value) is bool and not waiting
        for item in inner:
            kind = type(item)
            if kind is dict or kind is list:
                waiting.append((item, depth + 1))
            elif kind not in _PLAIN and not ((kind in (int, float)) and _is_finite(item)):
                return False
    return True


_PLAIN = frozenset((str, bool, type(None)))


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _check_shape(part: Part) -> None:
    if isinstance(part.schema, bool) or all(map(_is_plain, part.schema.items())):
        return
    for error in _validator().iter_errors(part.schema):
        path = map(str, error.absolute_path)
        why = error.message
        why = why if len(why) <= 200 else f"{why[:100]} ...{why[-90:]}"
        raise refused((*part.path, *path), f"can't be accepted: {why}")


def _is_plain(member: tuple[str, Any]) -> bool:
    """Whether a keyword is unknown, or one of the commonest with a value of the right shape: to
    ask `jsonschema` takes ten times as long."""
    key, value = member
    match value:
        case str():
            return value in _TYPES if key == "type" else key not in METASCHEMA or key in TEXTS
        case dict() if key in NAMED or key in DEFINITIONS:
            fits = key != "properties" or len(value) <= limits.SCHEMA_PROPERTIES
            return fits and all(isinstance(inner, (dict, bool)) for inner in value.values())
        case dict() | bool() if key in SINGLE or key == "items":
            return True
        case bool() if key == "uniqueItems":
            return True
        case int() if key in COUNTS and not isinstance(value, bool):
            return 0 <= value <= int(METASCHEMA[key]["maximum"])
        case int() | float() if key in ("minimum", "maximum"):
            return not isinstance(value, bool)
        case int() | float() if key == "multipleOf":
            return not isinstance(value, bool) and value > 0
        case list() if key in LISTED:
            return bool(value) and all(isinstance(inner, (dict, bool)) for inner in value)
        case list() if key == "enum":
            return 0 < len(value) <= limits.SCHEMA_VALUES
        case list() if key == "type":
            return bool(value) and all(name in _TYPE["enum"] for name in value)
        case list() if key == "required":
            texts = all(isinstance(name, str) for name in value)
            return texts and len(value) <= limits.SCHEMA_PROPERTIES
    return key not in METASCHEMA


def _refuse_cycles(view: View, parts: list[Part]) -> None:
    """Refuses a schema that refers to itself for the same value: no value conforms to it."""
    graph = {part.path: found for part in parts if (found := _same_value(view, part))}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[Path] = error.args[1]
        around = " <- ".join(pointer(path) for path in islice(cycle, 4))
        raise refused(cycle[0], f"refers to itself with nothing in between ({around})") from None


_SAME_VALUE = frozenset(("$ref", "allOf", "anyOf", "oneOf"))


def _same_value(view: View, part: Part) -> list[Path]:
    if isinstance(part.schema, bool) or _ends(part.schema):
        return []
    links, at = view.links(part), len(part.path)
    parts = [p for p in links.used if p.path[at] in _SAME_VALUE]
    parts += [links.target] if links.target else []
    return [p.path for p in parts if not (isinstance(p.schema, bool) or _ends(p.schema))]


def _ends(schema: Mapping[str, Any]) -> bool:
    """Whether the schema applies no other schema to the same value."""
    return _SAME_VALUE.isdisjoint(schema)


_VALUED = frozenset(("multipleOf", "const", "enum", "pattern", "patternProperties"))


def _check_values(part: Part) -> None:
    path, schema = part
    if isinstance(schema, bool) or _VALUED.isdisjoint(schema):
        return
    for key, value in schema.items():
        at = (*path, key)
        if key == "multipleOf" and _digits(schema) > limits.SCHEMA_MULTIPLES:
            raise refused(
                at,
                f"is {shorten(value)}, whose digits are more than {limits.SCHEMA_MULTIPLES}",
            )
        if key in ("const", "enum") and (text := _needs_escape(value)):
            raise refused(at, f"has a control character in {shorten(text)}, which can't be written")
        for pattern in [value] if key == "pattern" else value if key == "patternProperties" else ():
            if why := patterns.excessive_part(pattern):
                raise refused(at, f"{shorten(pattern)} {why}")


def _needs_escape(value: Any) -> str | None:
    """Returns the first text in it that JSON can write only with \\u escapes, which grammars
    forbid."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text if any(
                (c < " " and c not in "\n\r\t\b\f") or c == "\x7f" for c in text
            ):
                return text
            case list() as items:
                waiting += items
            case dict() as members:
                waiting += members.values()
    return None


def _check_multiples(view: View, parts: list[Part]) -> None:
    said = [part.schema for part in parts if not isinstance(part.schema, bool)]
    multiples = sum(_digits(schema) for schema in said if "multipleOf" in schema)
    if not multiples:
        return
    joined = math.prod(
        max(1, _digits(part.schema))
        for part, joined in visited(view)
        if joined and isinstance(part.schema, Mapping)
    )
    if max(multiples, joined) > limits.SCHEMA_MULTIPLES:
        raise refused(
            (),
            "has multipleOf that together come to more than "
            f"{limits.SCHEMA_MULTIPLES}, which is costly",
        )


def _digits(schema: Mapping[str, Any]) -> int:
    """Returns the number of states that `multipleOf` adds to the automaton: 0.25 costs as much as
    25."""
    if "multipleOf" not in schema:
        return 0
    digits = int(
        format(Decimal(repr(schema["multipleOf"])), "f").replace(".", "").strip("0") or "1"
    )
    return digits if digits > 10 else 0


ANYTHING: dict[str, Any] = {}


class _UnreadableError(Exception):
    """The keyword's value constrains nothing."""


@dataclass
class ReadableSchema:
    schema: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """`keyword at #/path` for each keyword that can't be read."""


def readable(schema: Mapping[str, Any]) -> ReadableSchema:
    found = ReadableSchema()
    found.schema = _read_schema(schema, (), found.lost)
    _drop_lost_references(found)
    return found


def _read_schema(schema: Mapping[str, Any], path: Path, lost: list[str]) -> dict[str, Any]:
    if len(path) > limits.SCHEMA_DEPTH:
        raise InvalidGrammar("The schema is nested too deeply.")
    found: dict[str, Any] = {}
    for key, value in schema.items():
        try:
            found[key] = _read(key, value, path, lost)
        except _UnreadableError:
            if value is not None:
                lost.append(f"{key} at {pointer(path)}")
    return found


def _read(key: str, value: Any, path: Path, lost: list[str]) -> Any:
    at = (*path, key)
    if key in NAMED or key in DEFINITIONS:
        return dict(_named(_checked(value, Mapping), at, lost))
    if key in LISTED or (key == "items" and isinstance(value, list)):
        options = _checked(value, list)
        _require(options)
        return [_inner(each, (*at, str(n)), lost) for n, each in enumerate(options)]
    if key in SINGLE:
        _require(isinstance(value, Mapping | bool))
        return _inner(value, at, lost)
    reader = READERS.get(key)
    return reader(value) if reader else value


def _named(given: Mapping[str, Any], at: Path, lost: list[str]) -> Iterator[tuple[str, Any]]:
    return ((name, _inner(each, (*at, name), lost)) for name, each in given.items())


def _inner(value: Any, at: Path, lost: list[str]) -> Any:
    """A schema in another one. In place of what is none any value is allowed."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return _read_schema(value, at, lost)
    lost.append(f"{at[-1]} at {pointer(at[:-1])}")
    return ANYTHING


def _read_type(value: Any) -> Any:
    if isinstance(value, list):
        _require(value)
        return [_read_type("null" if each is None else each) for each in value]
    name = _checked(value, str).lower()
    name = ALIASES.get(name, name)
    _require(name in ALL)
    return name


def _name_list(value: Any) -> Any:
    _require(all(isinstance(name, str) for name in _checked(value, list)))
    return value


def _values(value: Any) -> Any:
    _require(_checked(value, list))
    return value


def _number(value: Any) -> float:
    _require(not isinstance(value, bool))
    return value if isinstance(value, int) else _checked(value, float)


def _bound(value: Any) -> float | bool:
    return value if isinstance(value, bool) else _number(value)


def _positive(value: Any) -> float:
    _require(_number(value) > 0)
    return _number(value)


def _count(value: Any) -> int:
    number = _number(value)
    _require(0 <= number <= limits.SCHEMA_COUNT and number == int(number))
    return int(number)


def _checked(value: Any, kind: Any) -> Any:
    _require(isinstance(value, kind))
    return value


def _require(is_readable: object) -> None:
    if not is_readable:
        raise _UnreadableError


READERS: Mapping[str, Callable[[Any], Any]] = {
    "type": _read_type,
    "required": _name_list,
    "enum": _values,
    "multipleOf": _positive,
    "uniqueItems": lambda value: _checked(value, bool),
    "dependentRequired": lambda value: {
        n: _name_list(v) for n, v in _checked(value, Mapping).items()
    },
    "dependencies": lambda value: _checked(value, Mapping),
    **dict.fromkeys(("minimum", "maximum"), _number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _bound),
    **dict.fromkeys(COUNTS, _count),
    **dict.fromkeys((*TEXTS, "$ref"), lambda value: _checked(value, str)),
}


def _drop_lost_references(found: ReadableSchema) -> None:
    """Drops references to what is not there, or is outside of the schema."""
    view = View(found.schema)
    for part in list(subschemas_of(found.schema, DEFINITIONS)):
        if isinstance(part.schema, dict) and "$ref" in part.schema:
            try:
                view.target(part)
            except InvalidGrammar:
                del part.schema["$ref"]
                found.lost.append(f"$ref at {pointer(part.path)}")
