"""What an unchecked schema plainly says of arguments."""

from typing import Any

from mlx_server.grammars.arguments import (
    lenient_items,
    lenient_member,
    parts_of,
    required,
    types_of_member,
)
from mlx_server.grammars.view import View, required_by

SHOP: dict[str, Any] = {
    "allOf": [{"required": ["b"]}, {"$ref": "#/$defs/more"}],
    "anyOf": [{"required": ["c"]}, {"properties": {"a": {"type": "null"}}}],
    "properties": {"a": {"type": "string"}},
    "required": ["a", 3],
    "$defs": {"more": {"required": ["a", "d"], "additionalProperties": {"type": "integer"}}},
}


def test_what_one_of_several_alternatives_requires_is_not_required() -> None:
    assert required(SHOP) == ["a", "b", "d"]


def test_a_member_may_have_the_types_of_each_alternative() -> None:
    assert types_of_member(SHOP, "a") == {"string", "null"}


def test_a_member_that_is_not_listed_has_the_schema_of_the_others() -> None:
    assert types_of_member(SHOP, "z") == {"integer"}
    assert lenient_member({}, "z", View({})) == {}


def test_a_schema_that_contains_itself_is_read_once() -> None:
    schema = {"allOf": [{"$ref": "#"}]}
    assert parts_of(schema, View(schema)) == [schema, {"$ref": "#"}]


def test_items_of_all_parts_count() -> None:
    schema = {"items": {"type": "null"}, "allOf": [{"items": {"type": "string"}}, {"items": 3}]}
    assert lenient_items(schema, View(schema)) == {"anyOf": [{"type": "null"}, {"type": "string"}]}


def test_what_is_no_list_requires_nothing() -> None:
    assert required_by({"required": "abc"}) == []
