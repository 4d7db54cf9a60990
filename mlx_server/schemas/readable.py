"""What can be read of a tool's schema that is not quite JSON Schema, as PHP, signatures and other
APIs make them: `properties: []`, `type: "any"`, `required: true`.

A keyword that can't be read constrains nothing, and is reported. Nothing else becomes stricter.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.schemas.check import TEXTS
from mlx_server.schemas.report import COUNTS
from mlx_server.schemas.types import ALIASES, ALL
from mlx_server.schemas.view import (
    DEFINITIONS,
    LISTED,
    NAMED,
    SINGLE,
    Path,
    View,
    pointer,
    subschemas_of,
)

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
    found.schema = _schema(schema, (), found.lost)
    _drop_lost_references(found)
    return found


def _schema(schema: Mapping[str, Any], path: Path, lost: list[str]) -> dict[str, Any]:
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
        return _schema(value, at, lost)
    lost.append(f"{at[-1]} at {pointer(at[:-1])}")
    return ANYTHING


def _type(value: Any) -> Any:
    if isinstance(value, list):
        _require(value)
        return [_type("null" if each is None else each) for each in value]
    name = _checked(value, str).lower()
    name = ALIASES.get(name, name)
    _require(name in ALL)
    return name


def _names(value: Any) -> Any:
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
    "type": _type,
    "required": _names,
    "enum": _values,
    "multipleOf": _positive,
    "uniqueItems": lambda value: _checked(value, bool),
    "dependentRequired": lambda value: {n: _names(v) for n, v in _checked(value, Mapping).items()},
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
