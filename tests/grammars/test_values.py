"""A part of a checked schema, as the writers of grammars see it."""

from typing import Any

import pytest

from mlx_server.grammars.arguments import ValueSchema, arguments_of, listed_members
from mlx_server.grammars.view import View
from mlx_server.messages import Tool


def value(schema: dict[str, Any]) -> ValueSchema:
    return ValueSchema(schema, View(schema))


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "number"}, {"number"}),
        ({"type": "integer"}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        (
            {"$ref": "#/$defs/a", "type": "null", "$defs": {"a": {"type": ["null", "string"]}}},
            {"null"},
        ),
    ],
)
def test_types_are_those_of_all_options(schema: dict[str, Any], types: set[str]) -> None:
    assert value(schema).types == types


def test_counts_may_be_written_as_decimals() -> None:
    assert value({"minLength": 2.0}).counts("minLength", "maxLength") == (2, None)
    assert value({"maxLength": 3.0}).counts("minLength", "maxLength") == (0, 3)


def test_only_listed_values_of_an_allowed_type_may_stand() -> None:
    schema = value({"type": "string", "enum": ["a", 1]})
    assert schema.listed == ["a", 1]
    assert schema.may_list("a")
    assert not schema.may_list(1)
    assert value({"const": None}).listed == [None]
    assert value({}).listed is None


def test_says_only_sees_a_keyword_more() -> None:
    schema = {"type": "array", "items": {}, "title": "t"}
    assert value(schema).says_only("type", "items")
    assert not value({**schema, "uniqueItems": True}).says_only("type", "items")


def test_a_text_s_pattern_and_format() -> None:
    assert (value({"pattern": "^a"}).pattern, value({}).pattern) == ("^a", "")
    assert (value({"format": "date"}).format, value({}).format) == ("date", "")


def test_members_and_which_are_required() -> None:
    schema = value({"properties": {"a": {}, "b": {"type": "null"}}, "required": ["b"]})
    assert [(each.key, each.required) for each in listed_members(schema)] == [
        ("a", False),
        ("b", True),
    ]


def test_arguments_come_in_the_schema_s_order_and_those_only_required_last() -> None:
    schema = {"properties": {"b": {}, "a": {}}, "required": ["z", "a"]}
    (found,) = arguments_of(Tool("f", "", schema))
    assert [(each.key, each.required) for each in found] == [
        *(("b", False), ("a", True), ("z", True))
    ]


def test_a_variant_that_forbids_what_it_requires_is_no_way_to_call() -> None:
    schema = {"properties": {"a": False}, "required": ["a"]}
    assert arguments_of(Tool("f", "", schema)) == []
