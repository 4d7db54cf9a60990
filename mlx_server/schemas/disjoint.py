"""Tests whether the options of a `oneOf` exclude each other, so that it means the same as `anyOf`.

llguidance can prove this, but not across references and not for numbers. So it gets the options
with their references resolved, and with numbers as objects whose member `=` is the number. All
other constraints are left out: if the wider options are disjoint, the options themselves are too.
"""

import json
from collections.abc import Iterator
from typing import Any

from mlx_server import limits
from mlx_server.schemas.compiler import fault
from mlx_server.schemas.types import named, type_of
from mlx_server.schemas.view import Part, View

_KIND = "#"
"""The required member that distinguishes numbers (true) from objects (false)."""
_PLAIN = {name: {"type": name} for name in ("null", "boolean", "string", "array")}


class Disjointness:
    """Compares the options of each `oneOf` of one schema. All of them share one limit of work."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._looks = 0

    def holds(self, options: list[Part]) -> bool:
        """Whether no value can follow two of the options, as far as is known."""
        if self._looks >= limits.SCHEMA_COMPARISONS.value:
            return False
        return not fault(f"start: %json {json.dumps(self.probe(options))}")

    def probe(self, options: list[Part]) -> dict[str, Any]:
        """Returns a schema that llguidance accepts without `coerce_one_of` if the options are
        disjoint."""
        depth = limits.SCHEMA_DISJOINT_DEPTH.value
        return {"oneOf": [self._wider(option, depth) for option in options]}

    def _wider(self, part: Part, depth: int) -> Any:
        """Returns a schema without references that allows at least what the given one allows."""
        self._looks += 1
        if isinstance(part.schema, bool):
            return part.schema
        if not depth or self._looks > limits.SCHEMA_COMPARISONS.value:
            return True
        return {"allOf": list(self._constraints(part, depth - 1))}

    def _constraints(self, part: Part, depth: int) -> Iterator[Any]:
        path, schema = part
        assert not isinstance(schema, bool)
        types = sorted({"number" if name == "integer" else name for name in named(schema)})
        yield {"anyOf": [_PLAIN.get(name) or self._tagged(name, part, depth) for name in types]}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            self._looks += len(values)
            yield {"anyOf": [_value(value) for value in values]}
        if target := self._view.target(part):
            yield self._wider(target, depth)
        for key in ("allOf", "anyOf", "oneOf"):
            if key in schema:
                parts = (Part((*path, key, str(at)), one) for at, one in enumerate(schema[key]))
                inside = [self._wider(one, depth) for one in parts]
                yield {"allOf" if key == "allOf" else "anyOf": inside}

    def _tagged(self, name: str, part: Part, depth: int) -> dict[str, Any]:
        path, schema = part
        if name == "number" or isinstance(schema, bool):
            return _object(name)
        listed = schema.get("properties", {})
        self._looks += len(schema.get("required", ()))
        members = {
            f"={key}": self._wider(Part((*path, "properties", key), inner), depth)
            for key, inner in listed.items()
        }
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            required = schema.get("required", ())
            others = dict.fromkeys((f"={key}" for key in required if key not in listed), False)
            return _object(name, {**members, **others}, required, closed=True)
        return _object(name, members, schema.get("required", ()))


def _value(value: Any) -> dict[str, Any]:
    kind = type_of(value)
    if kind in ("integer", "number"):
        return _object("number", {"=": {"const": str(float(value) + 0.0)}}, ("",))
    if kind in ("array", "object"):
        return _PLAIN.get(kind) or _object(kind)
    return {"const": value}


def _object(
    kind: str, members: Any = None, required: Any = (), *, closed: bool = False
) -> dict[str, Any]:
    found = {
        "type": "object",
        "properties": {_KIND: {"const": kind == "number"}, **(members or {})},
        "required": [_KIND, *(f"={key}" for key in required)],
    }
    return {**found, "additionalProperties": False} if closed else found
