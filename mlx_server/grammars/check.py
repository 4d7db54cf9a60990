"""Refuses what is not a JSON Schema, and schemas that are too large, before they are compiled.

A keyword's value has to have the right shape (`SHAPES`). Of a tool's schema that is not quite JSON
Schema, such as `properties: []`, `readable` returns what can be used.

llguidance limits the work of compiling a schema itself, and refuses what takes more. The exception
is `multipleOf`, whose cost appears only while an answer is decoded.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import patterns
from mlx_server.grammars.grammar import COUNTS, visited
from mlx_server.grammars.view import (
    ALIASES,
    ALL,
    DEFINITIONS,
    HOLDERS,
    LISTED,
    NAMED,
    SINGLE,
    Part,
    Path,
    Schema,
    View,
    all_values,
    pointer,
    refused,
    shorten,
    subschemas_of,
)


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


def measure(schema: Any) -> None:
    """Raises InvalidGrammar if the schema has too many parts, or numbers that JSON can't express.

    It does not recurse, because a schema may be nested as deeply as its text allows."""
    waiting, nodes = [(schema, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, (Mapping, list)):
            nodes += 1
            if nodes > limits.SCHEMA_NODES:
                raise refused((), f"has more than {limits.SCHEMA_NODES} objects and arrays in it")
            if depth > limits.SCHEMA_DEPTH:
                raise refused((), f"is nested deeper than {limits.SCHEMA_DEPTH} levels")
            inner = value.values() if isinstance(value, Mapping) else value
            waiting += [(item, depth + 1) for item in inner]
        elif isinstance(value, (int, float)) and not _is_finite(value):
            raise refused((), f"has {shorten(value)}, a number too large for any JSON reader")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def check(view: View) -> None:
    """Raises InvalidGrammar if this is not a JSON Schema, or costs too much."""
    if view.root is False:
        raise refused((), "is false, which allows no value")
    if isinstance(view.root, Mapping):
        for fault in _read(view.root).faults:
            raise refused(fault.path, f"can't be accepted: {fault.why}")
    parts = view.reached()
    _refuse_cycles(view, parts)
    for part in parts:
        _check_values(part)
    _check_multiples(view, parts)


def _refuse_cycles(view: View, parts: list[Part]) -> None:
    """Refuses a schema that refers to itself for the same value: an answer would get stuck."""
    graph = {part.path: [one.path for one in _in_place(view, part)] for part in parts}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise refused(error.args[1][0], "refers to itself with nothing in between") from None


def _in_place(view: View, part: Part) -> list[Part]:
    """Returns the schemas that a schema applies to the same value."""
    links, at = view.links(part), len(part.path)
    parts = [one for one in links.used if one.path[at] in ("allOf", "anyOf", "oneOf")]
    return [*parts, links.target] if links.target else parts


NEEDS_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_VALUED = frozenset(("multipleOf", "const", "enum", "pattern", "patternProperties"))


def _check_values(part: Part) -> None:
    path, schema = part
    if isinstance(schema, bool) or _VALUED.isdisjoint(schema):
        return
    for key, value in schema.items():
        at = (*path, key)
        if key == "multipleOf" and _digits(schema) > limits.SCHEMA_MULTIPLES:
            raise refused(
                at, f"is {shorten(value)}, whose digits are more than {limits.SCHEMA_MULTIPLES}"
            )
        if key in ("const", "enum") and (text := _needs_escape(value)):
            raise refused(at, f"has a control character in {shorten(text)}, which can't be written")
        for pattern in [value] if key == "pattern" else value if key == "patternProperties" else ():
            if why := patterns.excessive_part(pattern):
                raise refused(at, f"{shorten(pattern)} {why}")


def _needs_escape(value: Any) -> str | None:
    """Returns the first text in it that JSON can write only with \\u escapes, which grammars
    forbid."""
    texts = (each for each in all_values(value) if isinstance(each, str))
    return next(filter(NEEDS_ESCAPE.search, texts), None)


def _check_multiples(view: View, parts: list[Part]) -> None:
    schemas = [part.schema for part in parts if not isinstance(part.schema, bool)]
    multiples = sum(_digits(schema) for schema in schemas if "multipleOf" in schema)
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


class Fault(NamedTuple):
    """A value that is not as JSON Schema has it."""

    path: Path
    why: str


@dataclass
class ReadableSchema:
    schema: dict[str, Any] = field(default_factory=dict)
    """What can be read of a schema."""
    lost: list[str] = field(default_factory=list)
    """`keyword at #/path` for each keyword that can't be read."""
    faults: list[Fault] = field(default_factory=list)
    """What can't be read, and what is read as something else."""

    def read(self, schema: Mapping[str, Any], path: Path = ()) -> dict[str, Any]:
        if len(path) > limits.SCHEMA_DEPTH:
            raise InvalidGrammar("The schema is nested too deeply.")
        own: dict[str, Any] = {}
        for key, entry in schema.items():
            value = _plain_types(entry) if key == "type" else entry
            fits, expected = SHAPES.get(key, _ANY)
            if not fits(value) and entry is not None:
                self.lost.append(f"{key} at {pointer(path)}")
            if not fits(value) or value != entry:
                self._add_fault((*path, key), entry, expected)
            if fits(value):
                own[key] = self._inner(value, (*path, key)) if key in HOLDERS else value
        return own

    def _inner(self, value: Any, at: Path) -> Any:
        if isinstance(value, list):
            return [self._schema(each, (*at, str(n))) for n, each in enumerate(value)]
        if at[-1] not in SINGLE:
            return {name: self._schema(each, (*at, name)) for name, each in value.items()}
        return self._schema(value, at)

    def _schema(self, value: Any, at: Path) -> Schema:
        """Reads a schema within another one. In place of what is none, any value is allowed."""
        if isinstance(value, bool):
            return value
        if isinstance(value, Mapping):
            return self.read(value, at)
        self.lost.append(f"{at[-1]} at {pointer(at[:-1])}")
        self._add_fault(at, value, "a schema")
        return {}

    def _add_fault(self, at: Path, value: Any, expected: str) -> None:
        self.faults.append(Fault(at, f"{shorten(value)} is not {expected}"))

    def drop_lost_references(self) -> None:
        """Drops references to what is not there, or is outside of the schema."""
        view = View(self.schema)
        for part in list(subschemas_of(self.schema, DEFINITIONS)):
            if isinstance(part.schema, dict) and "$ref" in part.schema:
                try:
                    view.target(part)
                except InvalidGrammar:
                    del part.schema["$ref"]
                    self.lost.append(f"$ref at {pointer(part.path)}")


def readable(schema: Mapping[str, Any]) -> ReadableSchema:
    result = _read(schema)
    result.drop_lost_references()
    return result


def _read(schema: Mapping[str, Any]) -> ReadableSchema:
    result = ReadableSchema()
    result.schema = result.read(schema)
    return result


def _plain_types(types: Any) -> Any:
    """Returns names of types as JSON Schema has them: others write `STRING`, `str` or a null."""
    if isinstance(types, list):
        return ["null" if name is None else _plain_type(name) for name in types]
    return _plain_type(types)


def _plain_type(name: Any) -> Any:
    return ALIASES.get(name.lower(), name.lower()) if isinstance(name, str) else name


def _are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in ALL for name in names)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any, most: int = limits.SCHEMA_COUNT) -> bool:
    return _is_number(value) and 0 <= value <= most and value == int(value)


def _are_names(value: Any) -> bool:
    names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return names and len(value) <= limits.SCHEMA_PROPERTIES


_ANY: tuple[Callable[[Any], bool], str] = (lambda value: True, "")
_ROWS: tuple[tuple[Iterable[str], Callable[[Any], bool], str], ...] = (
    (("type",), _are_types, f"one of {', '.join(sorted(ALL))}, or a list of some"),
    ((*NAMED, *DEFINITIONS, "dependencies"), lambda v: isinstance(v, Mapping), "an object"),
    (
        ("properties",),
        lambda v: isinstance(v, Mapping) and len(v) <= limits.SCHEMA_PROPERTIES,
        f"an object of up to {limits.SCHEMA_PROPERTIES} members",
    ),
    (LISTED, lambda v: isinstance(v, list) and bool(v), "a list of schemas"),
    (SINGLE, lambda v: isinstance(v, (Mapping, bool)), "a schema"),
    (("items",), lambda v: isinstance(v, (Mapping, bool, list)), "a schema"),
    (("required",), _are_names, f"a list of up to {limits.SCHEMA_PROPERTIES} texts"),
    (
        ("enum",),
        lambda v: isinstance(v, list) and 0 < len(v) <= limits.SCHEMA_VALUES,
        f"a list of 1 to {limits.SCHEMA_VALUES} values",
    ),
    (COUNTS, _is_count, f"a whole number from 0 to {limits.SCHEMA_COUNT}"),
    (
        ("maxLength",),
        lambda v: _is_count(v, limits.SCHEMA_TEXT_LENGTH),
        f"a whole number from 0 to {limits.SCHEMA_TEXT_LENGTH}",
    ),
    (("minimum", "maximum"), _is_number, "a number"),
    (
        ("exclusiveMinimum", "exclusiveMaximum"),
        lambda v: isinstance(v, bool) or _is_number(v),
        "a number",
    ),
    (("multipleOf",), lambda v: _is_number(v) and v > 0, "a number above 0"),
    (("uniqueItems",), lambda v: isinstance(v, bool), "true or false"),
    (
        ("dependentRequired",),
        lambda v: isinstance(v, Mapping) and all(map(_are_names, v.values())),
        "an object of lists of texts",
    ),
    (
        ("pattern", "format", "$ref", "$anchor", "$dynamicRef", "$recursiveRef"),
        lambda v: isinstance(v, str),
        "a text",
    ),
)
SHAPES = {key: (fits, expected) for keys, fits, expected in _ROWS for key in keys}
"""The values that keywords may have, and what they are called. jsonschema takes ten times as long
with the published metaschema, because it refers to itself dynamically at every level."""
