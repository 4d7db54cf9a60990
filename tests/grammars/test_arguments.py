"""What a tool's schema says of arguments: names, types, variants, and whether arguments fit."""

import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.grammars import arguments
from mlx_server.grammars.arguments import (
    arguments_of,
    fits,
    is_made_of,
    unsupported_as_text,
    unsupported_one_by_one,
)
from mlx_server.grammars.view import ALL, View, type_of, types_of
from mlx_server.messages import Tool
from mlx_server.requests import JsonFormat
from tests.grammars.matching import matcher_of, matches
from tests.slowness import slowness
from tests.tables import cases

# Types


@pytest.mark.parametrize(
    ("value", "name"),
    [
        *((None, "null"), (True, "boolean"), (1, "integer"), (1.0, "number"), ("", "string")),
        *(([None], "array"), ({"a": 1}, "object")),
    ],
)
def test_a_value_has_one_type(value: Any, name: str) -> None:
    assert type_of(value) == name


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["null", 3, "strange"]}, {"null"}),
        ({"type": "strange"}, ALL),
        ({"type": "dict"}, {"object"}),
        ({"anyOf": [{"type": "string"}, {"const": 1}]}, {"string", "integer"}),
        ({"anyOf": [True, {"type": "null"}]}, ALL),
        ({"anyOf": "x"}, ALL),
        ({"allOf": [{"type": ["string", "null"]}, {"enum": [None, "a", 3]}]}, {"string", "null"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}}, {"boolean"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, ALL),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, ALL),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ALL),
    ],
)
def test_types_follow_references_and_combinations(schema: Any, types: set[str]) -> None:
    assert types_of(schema, View(schema)) == types


# Members


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


@cases
def test_a_member_is_a_schema_of_its_own(key: str, good: str, bad: str) -> None:
    alone = arguments.member(REFERRING, key)
    matcher = matcher_of(JsonFormat(alone))
    assert (matches(matcher, good), matches(matcher, bad)) == (True, False)
    validator = jsonschema.Draft202012Validator(alone)
    assert validator.is_valid(json.loads(good))
    assert not validator.is_valid(json.loads(bad))


# Ways to call


A, B = {"required": ["a"]}, {"required": ["b"]}
LISTED: dict[str, Any] = {"properties": {"a": {}, "b": {}}}


@cases
def test_each_choice_makes_variants(schema: Any, sets: list[str], reported: list[str]) -> None:
    tool = Tool("f", "", schema)
    ways = arguments_of(tool)
    assert ["".join(sorted(m.key for m in way if m.required)) for way in ways] == sets
    assert [found.keyword for found in unsupported_one_by_one(tool)] == reported


@cases
def test_patterns_of_texts_without_quotes_may_be_reported(schema: Any, reported: list[str]) -> None:
    assert [found.keyword for found in unsupported_as_text(Tool("f", "", schema))] == reported


# Whether arguments fit


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": ["integer", "null"]},
        "at": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@cases
def test_arguments_fit_by_names_types_and_values(given: dict[str, Any], is_fit: bool) -> None:
    assert fits(given, CITY) is is_fit
    assert is_made_of(given, CITY) is (is_fit and "more" not in given)


@given(st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=3)))
def test_any_arguments_and_a_schema_that_leads_back_to_itself(given: dict[str, Any]) -> None:
    endless = {"properties": {key: {"$ref": "#"} for key in given}, "allOf": [{"$ref": "#"}]}
    assert fits(given, endless) in (True, False)


def test_a_large_value_takes_no_long_time() -> None:
    begun = time.thread_time()
    assert fits({"city": "x", "tags": ["a"] * 100_000}, CITY)
    assert time.thread_time() - begun < 4 * slowness()
