"""Whether arguments fit a tool's schema, as far as that is looked at."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.grammars.arguments import fits, is_made_of
from tests.slowness import slowness

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


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Lyon"},
        {"city": "Lyon", "unit": "c", "days": None},
        {"city": "Lyon", "at": {"x": 1}},
        {"city": "Lyon", "tags": ["a"]},
        {"city": "Lyon", "more": 1},
    ],
)
def test_what_fits(arguments: dict[str, Any]) -> None:
    assert fits(arguments, CITY)
    assert is_made_of(arguments, CITY) is ("more" not in arguments)


def test_every_part_of_a_nested_allof_counts() -> None:
    inner = {"allOf": [{"properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}]}
    schema = {"properties": {"city": {"type": "string"}}, "allOf": [inner]}
    assert is_made_of({"city": "Lyon", "unit": "c"}, schema)
    assert not fits({"city": "Lyon"}, schema)
    assert not fits({"city": "Lyon", "unit": "k"}, schema)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"city": 1},
        {"city": "Lyon", "unit": "k"},
        {"city": "Lyon", "days": "two"},
        {"city": "Lyon", "at": {}},
        {"city": "Lyon", "at": {"x": 1, "y": 2}},
        {"city": "Lyon", "tags": ["a", 1]},
    ],
)
def test_what_does_not(arguments: dict[str, Any]) -> None:
    assert not fits(arguments, CITY)


def test_a_schema_that_says_nothing_is_fitted_by_all_and_made_of_nothing() -> None:
    assert fits({"a": 1}, {})
    assert not is_made_of({"a": 1}, {})
    assert not is_made_of({}, CITY)


@given(st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=3)))
def test_any_arguments_and_a_schema_that_leads_back_to_itself(arguments: dict[str, Any]) -> None:
    endless: dict[str, Any] = {
        "properties": {key: {"$ref": "#"} for key in arguments},
        "allOf": [{"$ref": "#"}],
    }
    assert fits(arguments, endless) in (True, False)


@pytest.mark.slow
def test_a_large_value_takes_no_long_time() -> None:
    begun = time.thread_time()
    assert fits({"city": "x", "tags": ["a"] * 100_000}, CITY)
    assert time.thread_time() - begun < 4 * slowness()
