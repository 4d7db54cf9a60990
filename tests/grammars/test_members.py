"""The members of an object's schema."""

import json
from typing import Any

import jsonschema
import pytest

from mlx_server.grammars import arguments
from mlx_server.grammars.arguments import (
    is_forbidden,
    lists_properties,
    member,
    object_of,
    properties_of,
    required,
)
from mlx_server.grammars.view import View
from mlx_server.requests import JsonFormat
from tests.grammars.matching import matcher_of, matches

SHOP: dict[str, Any] = {
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "allOf": [{"$ref": "#/$defs/more"}],
    "$defs": {
        "more": {
            "properties": {"a": {"minLength": 1}, "b": {"$ref": "#/$defs/b"}},
            "required": ["b"],
        },
        "b": {"items": {"$ref": "#/$defs/b"}},
    },
}


def test_members_of_references_and_all_of_count() -> None:
    assert properties_of(SHOP) == {"a": {"type": "string"}, "b": {"$ref": "#/$defs/b"}}
    assert required(SHOP) == ["a", "b"]


def test_a_member_has_all_its_schemas_and_what_they_refer_to() -> None:
    assert member(SHOP, "a") == {"allOf": [{"type": "string"}, {"minLength": 1}]}
    found = member(SHOP, "b")
    assert found["items"]["$ref"].removeprefix("#/$defs/") in found["$defs"]


def test_a_member_that_is_not_listed() -> None:
    assert member({"additionalProperties": {"type": "null"}}, "z") == {"type": "null"}
    assert member({}, "z") == {}
    assert is_forbidden(View({"additionalProperties": False}), "z")
    assert not is_forbidden(View({}), "z")


@pytest.mark.parametrize(
    ("parameters", "is_closed"),
    [
        ({"properties": {"a": {}}}, True),
        ({"properties": {"a": {}}, "required": ["b"]}, False),
        ({"properties": {"a": {}}, "minProperties": 1}, False),
        ({"properties": {"a": {}}, "patternProperties": {}}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_tool_that_lists_its_arguments_takes_no_others(parameters: Any, is_closed: bool) -> None:
    found = object_of(parameters)
    assert found["type"] == "object"
    assert (found.get("additionalProperties") is False) is is_closed


def test_an_empty_list_of_properties_lists_none() -> None:
    assert lists_properties({"properties": {"a": {}}})
    assert not lists_properties({"properties": {}})
    assert not lists_properties({"additionalProperties": True})


REFERRING: dict[str, Any] = {
    "type": "object",
    "allOf": [{"$ref": "#/$defs/base"}],
    "properties": {
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "again": {"$ref": "#"},
        "first": {"$ref": "#/properties/items/items", "description": "the first"},
        "count": {"type": "integer"},
    },
    "required": ["items"],
    "$defs": {
        "base": {"properties": {"id": {"type": "string"}}, "required": ["id"]},
        "item": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/item/$defs/deep"}],
                 "$defs": {"deep": {"type": "array", "items": {"$ref": "#tree"}}}},
        "tree": {"$anchor": "tree", "type": "object", "maxProperties": 0},
    },
}  # fmt: skip


def test_members_are_found_through_references_and_all_of() -> None:
    assert list(arguments.properties_of(REFERRING)) == ["items", "again", "first", "count", "id"]
    assert arguments.required(REFERRING) == ["items", "id"]
    assert arguments.properties_of(True) == {}


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("items", '["a", [{}, {}]]', '["a", [1]]'),
        ("again", '{"id": "x", "items": ["a"]}', '{"id": "x", "items": [1]}'),
        ("first", "[{}]", "{}"),
        ("count", "1", '"1"'),
        ("id", '"1"', "1"),
    ],
)
def test_a_member_is_a_schema_of_its_own(key: str, good: str, bad: str) -> None:
    alone = arguments.member(REFERRING, key)
    matcher = matcher_of(JsonFormat(alone))
    assert matches(matcher, good)
    assert not matches(matcher, bad)
    validator = jsonschema.Draft202012Validator(alone)
    assert validator.is_valid(json.loads(good))
    assert not validator.is_valid(json.loads(bad))


def test_a_member_carries_no_more_than_it_refers_to() -> None:
    assert arguments.member(REFERRING, "count") == {"type": "integer"}
    assert arguments.member(REFERRING, "nobody") == {}
    assert arguments.member({"additionalProperties": {"type": "null"}}, "x") == {"type": "null"}
