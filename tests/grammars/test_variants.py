"""A schema of several sets of members, as one schema for each."""

from typing import Any

import pytest

from mlx_server import limits
from mlx_server.grammars.arguments import required, variants_of

A, B = {"required": ["a"]}, {"required": ["b"]}
LISTED: dict[str, Any] = {"properties": {"a": {}, "b": {}}}


@pytest.mark.parametrize(
    ("schema", "sets"),
    [
        (LISTED, [set()]),
        ({"anyOf": [A, B]}, [{"a"}, {"b"}]),
        ({"anyOf": [A, B], "required": ["c"]}, [{"a", "c"}, {"b", "c"}]),
        ({"oneOf": [A, {"type": "string"}, False]}, [{"a"}]),
        ({**LISTED, "minProperties": 1}, [{"a"}, {"b"}]),
        ({"anyOf": [A, B], "oneOf": [A, B]}, [{"a"}, {"a", "b"}, {"a", "b"}, {"b"}]),
    ],
)
def test_each_choice_makes_variants(schema: dict[str, Any], sets: list[set[str]]) -> None:
    assert [set(required(one.schema)) for one in variants_of(schema)] == sets


def test_choices_that_can_not_be_listed_stay_open() -> None:
    (variant,) = variants_of({**LISTED, "minProperties": 2})
    assert [choice.path for choice in variant.choices()] == [("minProperties",)]
    (variant,) = variants_of({**LISTED, "maxProperties": 1})
    assert [choice.path for choice in variant.choices()] == [("maxProperties",)]


def test_there_are_no_more_variants_than_the_limit() -> None:
    options = [{"required": [f"a{n}"]} for n in range(limits.SCHEMA_VARIANTS)]
    assert len(variants_of({"anyOf": options})) == len(options)
    (variant,) = variants_of({"anyOf": [*options, A]})
    assert [choice.path for choice in variant.choices()] == [("anyOf",)]
