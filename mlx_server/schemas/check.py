"""What a schema may cost: a compile can't be cancelled, so none begins that would be long.

The limits are measured ones: what is within compiles in far less than two seconds and 256 MiB.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from itertools import islice, product
from typing import Any

from mlx_server import limits
from mlx_server.schemas import patterns
from mlx_server.schemas.report import COUNTS, visited
from mlx_server.schemas.types import named
from mlx_server.schemas.view import (
    DEFINITIONS,
    LISTED,
    NAMED,
    SINGLE,
    Part,
    Path,
    View,
    children,
    pointer,
    refused,
    shorten,
)

_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_TIMES = tuple(key for key in COUNTS if key != "maxLength")
_NUMBERS = ("minimum", "maximum", "multipleOf")
_BOUNDS = (
    (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"), ("integer", "number")),
    (("minLength",), ("maxLength",), ("string",)),
    (("minItems",), ("maxItems",), ("array",)),
    (("minProperties",), ("maxProperties",), ("object",)),
)
"""Least, most, and the types of which they speak."""


def check_limits(schema: Any) -> None:
    """Raises InvalidGrammar for what is no JSON schema, or one that would cost too much."""
    if not isinstance(schema, (Mapping, bool)):
        raise refused((), f"must be an object or a boolean, not {shorten(schema)}")
    if schema is False:
        raise refused((), "is false, which no value follows")
    if schema is True:
        return
    _check_size(schema)
    view = View(schema)
    parts = list(view.all())
    for part in parts:
        _check_shapes(part)
    _refuse_cycles(view, parts)
    _refuse_long_chains(view, parts)
    for part in parts:
        _check_counts(part)
        _check_bounds(part)
    _check_sums(view, parts)


def _check_size(schema: Any) -> None:
    """Without recursion: a schema may be nested as deep as its text allows."""
    waiting: list[tuple[Any, Path]] = [(schema, ())]
    nodes = 0
    while waiting:
        value, path = waiting.pop()
        if isinstance(value, (Mapping, list)):
            nodes += 1
            if nodes > limits.SCHEMA_NODES.value:
                raise refused(
                    (), f"has more than {limits.SCHEMA_NODES.value} objects and arrays in it"
                )
            if len(path) > 2 * limits.SCHEMA_DEPTH.value:
                raise refused(path, f"is nested deeper than {limits.SCHEMA_DEPTH.value} schemas")
            inner = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting += [(item, (*path, str(key))) for key, item in inner]
        elif isinstance(value, (int, float)) and not _is_finite(value):
            raise refused(path, "is a number too large for any JSON reader")
    _check_text(schema)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _check_text(schema: Any) -> None:
    text = json.dumps(schema, ensure_ascii=False)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise refused((), "has half of a surrogate pair in a text") from None
    if size > limits.SCHEMA_BYTES.value:
        raise refused((), f"has {size} bytes, more than {limits.SCHEMA_BYTES.value}")


def _check_shapes(part: Part) -> None:
    path, schema = part
    if isinstance(schema, bool):
        return
    for key, value in schema.items():
        if must := next((must for fits, must in _shapes(key) if not fits(value)), None):
            raise refused((*path, key), f"must be {must}, not {shorten(value)}")


def _shapes(key: str) -> Iterator[tuple[Callable[[Any], bool], str]]:
    if key in NAMED or key in DEFINITIONS:
        yield lambda v: _is_map(v, _is_schema), "an object of schemas"
    elif key in LISTED:
        yield lambda v: _is_list(v, _is_schema), "a list of schemas, not an empty one"
    elif key == "items":
        yield lambda v: _is_schema(v) or _is_list(v, _is_schema, 0), "a schema"
    elif key in SINGLE:
        yield _is_schema, "a schema (an object or a boolean)"
    elif key in COUNTS:
        yield lambda v: _is_number(v) and v >= 0 and v % 1 == 0, "a whole number from 0"
    elif key in _NUMBERS:
        yield _is_number, "a number"
        yield (lambda v: key != "multipleOf" or v > 0), "greater than 0"
    elif key in ("exclusiveMinimum", "exclusiveMaximum"):
        yield lambda v: _is_number(v) or isinstance(v, bool), "a number"
    elif key == "type":
        yield lambda v: _is_type(v) or _is_list(v, _is_type), "one of " + ", ".join(sorted(_TYPES))
    elif key == "required":
        yield lambda v: _is_list(v, _is_text, 0), "a list of property names"
    elif key == "enum":
        yield lambda v: _is_list(v, lambda _: True), "a list of values, not an empty one"
    elif key in ("pattern", "format", "$anchor", "$dynamicRef", "$recursiveRef"):
        yield _is_text, "a text"
    elif key == "dependentRequired":
        yield lambda v: _is_map(v, lambda names: _is_list(names, _is_text, 0)), "lists of names"
    elif key == "dependencies":
        yield lambda v: isinstance(v, Mapping), "an object"
    elif key == "uniqueItems":
        yield lambda v: isinstance(v, bool), "true or false"


def _is_schema(value: Any) -> bool:
    return isinstance(value, (Mapping, bool))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in _TYPES


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list(value: Any, fits: Callable[[Any], bool], least: int = 1) -> bool:
    return isinstance(value, list) and len(value) >= least and all(map(fits, value))


def _is_map(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(map(fits, value.values()))


def _refuse_cycles(view: View, parts: list[Part]) -> None:
    """A schema that is itself, with nothing of a value in between, has no value."""
    graph = {part.path: _same_value(view, part) for part in parts}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[Path] = error.args[1]
        around = " <- ".join(pointer(path) for path in islice(cycle, 4))
        raise refused(cycle[0], f"refers to itself with nothing in between ({around})") from None


def _same_value(view: View, part: Part) -> list[Path]:
    if isinstance(part.schema, bool):
        return []
    target = view.target(part)
    at = len(part.path)
    inside = [p.path for p in children(part) if p.path[at] in ("allOf", "anyOf", "oneOf")]
    return inside + ([target.path] if target else [])


def _refuse_long_chains(view: View, parts: list[Part]) -> None:
    heads = {(), *(target.path for part in parts if (target := view.target(part)))}
    depths = dict.fromkeys(heads, 0)
    for part in parts:
        for length in range(len(part.path), -1, -1):
            if part.path[:length] in depths:
                head = part.path[:length]
                depths[head] = max(depths[head], 1 + (len(part.path) - length + 1) // 2)
                break
    if sum(depths.values()) > limits.SCHEMA_CHAIN.value:
        raise refused(
            (),
            "has references that may lead through more than "
            f"{limits.SCHEMA_CHAIN.value} schemas in a row",
        )


def _check_counts(part: Part) -> None:
    path, schema = part
    if isinstance(schema, bool):
        return
    for key, value in schema.items():
        at = (*path, key)
        if key in ("properties", "required") and len(value) > limits.SCHEMA_PROPERTIES.value:
            raise refused(at, f"has {len(value)} names, more than {limits.SCHEMA_PROPERTIES.value}")
        if key == "enum" and len(value) > limits.SCHEMA_VALUES.value:
            raise refused(at, f"has {len(value)} values, more than {limits.SCHEMA_VALUES.value}")
        if key in _TIMES and value > limits.SCHEMA_COUNT.value:
            raise refused(at, f"is {shorten(value)}, more than {limits.SCHEMA_COUNT.value}")
        if key == "maxLength" and value > limits.SCHEMA_TEXT_LENGTH.value:
            raise refused(at, f"is {shorten(value)}, more than {limits.SCHEMA_TEXT_LENGTH.value}")
        if key == "multipleOf" and _digits(schema) > limits.SCHEMA_MULTIPLES.value:
            raise refused(
                at,
                f"is {shorten(value)}, whose digits are more than {limits.SCHEMA_MULTIPLES.value}",
            )
        if key in ("const", "enum") and (text := _needs_escape(value)):
            raise refused(at, f"has a control character in {shorten(text)}, which can't be written")
        for pattern in [value] if key == "pattern" else value if key == "patternProperties" else ():
            if why := patterns.excessive_part(pattern):
                raise refused(at, f"{shorten(pattern)} {why}")


def _check_bounds(part: Part) -> None:
    path, schema = part
    if isinstance(schema, bool):
        return
    for least, most, types in _BOUNDS:
        if not named(schema) <= {*types}:
            continue  # a value of another type may follow it
        for low, high in product(least, most):
            if _is_number(schema.get(low)) and _is_number(schema.get(high)):
                inclusive = (low, high) == (least[0], most[0])
                if schema[low] > schema[high] or (schema[low] == schema[high] and not inclusive):
                    beside = f"is {shorten(schema[low])} beside {high} {shorten(schema[high])}"
                    raise refused((*path, low), f"{beside}: no value follows both")


def _needs_escape(value: Any) -> str | None:
    """A text that JSON writes with \\u only (see lark.py)."""
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


def _check_sums(view: View, parts: list[Part]) -> None:
    said = [(part.path, part.schema) for part in parts if isinstance(part.schema, Mapping)]
    named = sum(len(schema.get("patternProperties", ())) for _, schema in said)
    if named > limits.SCHEMA_PATTERN_PROPERTIES.value:
        raise refused(
            (), f"has {named} patternProperties, more than {limits.SCHEMA_PATTERN_PROPERTIES.value}"
        )
    multiples = sum(_digits(schema) for _, schema in said)
    joined = math.prod(
        max(1, _digits(part.schema))
        for part, joined in visited(view)
        if joined and isinstance(part.schema, Mapping)
    )
    if max(multiples, joined) > limits.SCHEMA_MULTIPLES.value:
        raise refused(
            (),
            "has multipleOf that together come to more than "
            f"{limits.SCHEMA_MULTIPLES.value}, which is costly",
        )


def _digits(schema: Mapping[str, Any]) -> int:
    """The states of its automaton: 0.25 costs what 25 does."""
    value = schema.get("multipleOf", 1)
    digits = int(format(Decimal(repr(value)), "f").replace(".", "").strip("0") or "1")
    return digits if digits > 10 else 0
