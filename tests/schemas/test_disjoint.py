"""Whether the options of a `oneOf` exclude each other."""

from typing import Any

import pytest

from mlx_server.schemas.disjoint import Disjointness
from mlx_server.schemas.view import Part, View


def disjoint(*options: Any, **root: Any) -> bool:
    schema = {"oneOf": [*options], **root}
    parts = [Part(("oneOf", str(at)), option) for at, option in enumerate(options)]
    return Disjointness(View(schema)).holds(parts)


CAT = {"properties": {"kind": {"const": "cat"}}, "required": ["kind"], "type": "object"}
DOG = {"properties": {"kind": {"const": "dog"}}, "required": ["kind"], "type": "object"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (({"type": "string"}, {"type": "null"}), True),
        (({"type": "integer"}, {"type": "number"}), False),
        (({"const": 1}, {"const": 2}), True),
        (({"const": 1}, {"const": 1.0}), False),
        (({"enum": ["a", "b"]}, {"enum": ["b"]}), False),
        ((CAT, DOG), True),
        ((CAT, {**DOG, "required": []}), True),
        (({**CAT, "required": []}, {**DOG, "required": []}), False),
        (({"pattern": "^a"}, {"pattern": "^b"}), False),
        ((True, CAT), False),
    ],
)
def test_options_are_compared_by_types_values_and_members(
    options: tuple[Any, ...], expected: bool
) -> None:
    assert disjoint(*options) is expected


def test_references_are_followed() -> None:
    cat, dog = {"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}
    assert disjoint(cat, dog, **{"$defs": {"cat": CAT, "dog": DOG}})
    assert not disjoint(cat, cat, **{"$defs": {"cat": CAT}})
