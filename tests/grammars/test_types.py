"""The JSON types that a schema allows."""

from typing import Any

import pytest

from mlx_server.grammars.view import ALL, View, listed, named, resolved, type_of, types_of


@pytest.mark.parametrize(
    ("value", "name"),
    [(None, "null"), (True, "boolean"), (1, "integer"), (1.0, "number"), ("", "string")],
)
def test_a_value_has_one_type(value: Any, name: str) -> None:
    assert type_of(value) == name
    assert type_of([value]) == "array"
    assert type_of({"a": value}) == "object"


@pytest.mark.parametrize(
    ("said", "types"),
    [
        ("string", {"string"}),
        ("number", {"number", "integer"}),
        (["null", "integer"], {"null", "integer"}),
        (["null", 3, "strange"], {"null"}),
        ("strange", ALL),
        (None, ALL),
    ],
)
def test_every_integer_is_a_number_and_unknown_types_restrict_nothing(
    said: Any, types: set[str]
) -> None:
    assert named({"type": said}) == types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "dict"}, {"object"}),
        ({"anyOf": [{"type": "string"}, {"const": 1}]}, {"string", "integer"}),
        ({"allOf": [{"type": ["string", "null"]}, {"enum": [None, "a", 3]}]}, {"string", "null"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}}, {"boolean"}),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, ALL),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ALL),
    ],
)
def test_types_follow_references_and_combinations(schema: Any, types: set[str]) -> None:
    assert types_of(schema, View(schema)) == types


def test_references_in_a_circle_lead_nowhere() -> None:
    schema = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    }
    assert resolved(schema, View(schema)) == {}


def test_options_that_are_no_objects_allow_anything() -> None:
    assert listed({"anyOf": [True, {"type": "null"}]}, "anyOf") == [{}, {"type": "null"}]
    assert listed({"anyOf": "x"}, "anyOf") == []
