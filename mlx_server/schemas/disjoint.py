"""Tests whether the options of a `oneOf` exclude each other, so that it means the same as `anyOf`.

Two options do if no value can follow both. Their types, their listed values and the members that
either requires are compared; all other constraints are ignored. llguidance does the same, but not
across references and not for numbers, and compiles a grammar for it.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.schemas.report import is_closed
from mlx_server.schemas.types import ALL, named, type_of
from mlx_server.schemas.view import Part, Path, View

_KINDS = ALL - {"integer"}
_OBJECT = frozenset(("object",))

Listed = frozenset[tuple[str, Any]]
"""Listed values, each with its kind. Of arrays and objects only the kind is compared."""


class _Shape(NamedTuple):
    """The compared constraints of several schemas on the same value."""

    kinds: frozenset[str] = _KINDS
    """The types, where every integer is a number."""
    listed: Listed | None = None
    """The only values, if they are listed."""
    required: tuple[str, ...] = ()
    objects: tuple[Part, ...] = ()
    """The schemas themselves, which may constrain the members of an object."""
    choices: tuple[list[Part], ...] = ()
    """Lists of alternatives; the value follows one of each list as well."""

    def joined(self, other: "_Shape") -> "_Shape":
        kinds, listed = self.kinds & other.kinds, _common(self.listed, other.listed)
        if listed is not None:
            listed = frozenset(value for value in listed if value[0] in kinds)
            kinds = frozenset(kind for kind, _ in listed)
        return _Shape(
            kinds,
            listed,
            (*self.required, *other.required),
            (*self.objects, *other.objects),
            (*self.choices, *other.choices),
        )


_NOTHING = _Shape(kinds=frozenset())


class Disjointness:
    """Compares the options of each `oneOf` of one schema. All of them share one limit of work."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._looks = 0
        self._shapes: dict[Path, _Shape] = {}

    def holds(self, options: list[Part]) -> bool:
        """Whether no value can follow two of the options, as far as is known."""
        shapes = [self._shape(option) for option in options]
        if self._looks > limits.SCHEMA_COMPARISONS:
            return False
        depth = limits.SCHEMA_DISJOINT_DEPTH
        return self._are_tagged(shapes) or all(
            self._is_empty(one.joined(other), depth) for one, other in combinations(shapes, 2)
        )

    def _are_tagged(self, shapes: list[_Shape]) -> bool:
        """Whether types and listed values distinguish the options, and those of a member that all
        objects among them require distinguish the objects. Hundreds of options are compared at
        once."""
        objects = [shape for shape in shapes if shape.kinds == _OBJECT]
        others = [shape for shape in shapes if shape.kinds != _OBJECT]
        if not _are_distinct([*others, *objects[:1]]):
            return False
        tags = frozenset[str]().union(*(shape.required for shape in objects[:1]))
        tags = tags.intersection(*(shape.required for shape in objects))
        return len(objects) < 2 or any(
            _are_distinct([self._member(shape, name) for shape in objects]) for name in tags
        )

    def _is_empty(self, shape: _Shape, depth: int) -> bool:
        """Whether no value has this shape."""
        self._looks += 1
        if not depth or self._looks > limits.SCHEMA_COMPARISONS:
            return False
        if not shape.kinds:
            return True
        if shape.kinds == _OBJECT and any(
            self._is_empty(self._member(shape, name), depth - 1)
            for name in dict.fromkeys(shape.required)
        ):
            return True
        if not shape.choices:
            return False
        options, *others = shape.choices
        rest = shape._replace(choices=tuple(others))
        return all(self._is_empty(rest.joined(self._shape(one)), depth - 1) for one in options)

    def _member(self, shape: _Shape, name: str) -> _Shape:
        found = _Shape()
        for path, schema in shape.objects:
            assert isinstance(schema, Mapping)
            listed = schema.get("properties", {})
            if name in listed:
                found = found.joined(self._shape(Part((*path, "properties", name), listed[name])))
            elif is_closed(schema):
                return _NOTHING
        return found

    def _shape(self, part: Part) -> _Shape:
        """Returns the shape of a schema with its references and `allOf`."""
        if part.path not in self._shapes:
            self._shapes[part.path] = _Shape()  # a schema that refers to itself adds nothing
            self._shapes[part.path] = self._made(part)
        return self._shapes[part.path]

    def _made(self, part: Part) -> _Shape:
        schema = part.schema
        self._looks += 1
        if isinstance(schema, bool):
            return _Shape() if schema else _NOTHING
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        required = tuple(schema.get("required", ()))
        self._looks += len(values or ()) + len(required)
        shape = _Shape(
            kinds=frozenset(map(_kind, named(schema))),
            required=required,
            objects=(part,),
            choices=tuple(_listed(part, key) for key in ("anyOf", "oneOf") if key in schema),
        )
        if values is not None:
            shape = shape.joined(_Shape(listed=frozenset(map(_value, values))))
        target = self._view.target(part)
        for one in (*([target] if target else ()), *_listed(part, "allOf")):
            shape = shape.joined(self._shape(one))
        return shape


def _are_distinct(shapes: list[_Shape]) -> bool:
    """Whether each value is listed at most once, and each other type allowed at most once."""
    values = [value for shape in shapes for value in shape.listed or ()]
    types = [kind for shape in shapes if shape.listed is None for kind in shape.kinds]
    types += {kind for kind, _ in values}
    return len({*values}) == len(values) and len({*types}) == len(types)


def _common(one: Listed | None, other: Listed | None) -> Listed | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _listed(part: Part, key: str) -> list[Part]:
    path, schema = part
    assert isinstance(schema, Mapping)
    return [Part((*path, key, str(at)), one) for at, one in enumerate(schema.get(key, ()))]


def _kind(type: str) -> str:
    return "number" if type == "integer" else type


def _value(value: Any) -> tuple[str, Any]:
    kind = _kind(type_of(value))
    if kind in ("array", "object"):
        return kind, None
    return kind, value
