"""The members of an object's schema."""

from typing import Any

import pytest

from mlx_server.schemas.members import (
    is_forbidden,
    lists_properties,
    member,
    object_of,
    properties_of,
    required_of,
)
from mlx_server.schemas.view import View

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
    assert required_of(SHOP) == {"a", "b"}


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
