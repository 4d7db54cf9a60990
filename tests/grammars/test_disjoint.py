"""Whether the options of a `oneOf` exclude each other."""

from typing import Any

import pytest

from mlx_server.grammars.grammar import Disjointness
from mlx_server.grammars.view import Part, View


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
        (({"const": 10**400}, {"const": 1.5}), True),
        (({"enum": ["a", "b"]}, {"enum": ["b"]}), False),
        ((CAT, DOG), True),
        ((CAT, {**DOG, "required": []}), True),
        (({**CAT, "required": []}, {**DOG, "required": []}), False),
        (({"pattern": "^a"}, {"pattern": "^b"}), False),
        ((True, CAT), False),
        ((False, CAT), True),
        ((CAT, {"properties": DOG["properties"], "required": ["kind"]}), True),
        (({**CAT, "type": ["object", "null"]}, {**DOG, "type": ["object", "null"]}), False),
        ((CAT, {"type": ["object", "null"], "required": ["kind"]}), False),
        (({"type": "string", "enum": ["a", None]}, {"type": "null"}), True),
        (({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, CAT), True),
        (({"const": [1]}, {"const": [2]}), False),
        (({"type": "object", "required": ["name"]}, {**CAT, "additionalProperties": False}), True),
        (({"anyOf": [CAT, {"type": "null"}]}, {"anyOf": [DOG, {"type": "string"}]}), True),
        (({"anyOf": [CAT, {"type": "null"}]}, {"anyOf": [DOG, {"enum": [1, None]}]}), False),
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


def tagged(name: str) -> dict[str, Any]:
    return {**CAT, "properties": {"kind": {"const": name}}}


def test_hundreds_of_options_are_compared() -> None:
    values = [{"const": str(at)} for at in range(400)]
    objects = [tagged(str(at)) for at in range(400)]
    assert disjoint(*values, *objects, {"type": "null"})
    assert not disjoint(*values, {"const": "7"})
    assert not disjoint(*objects, tagged("7"))


def test_a_member_of_a_member_may_tell_them_apart() -> None:
    inner = [{**CAT, "properties": {"kind": one}} for one in (CAT, DOG)]
    assert disjoint(*inner)
    assert not disjoint(*inner, inner[0])
