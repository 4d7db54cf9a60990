"""What does not conform is named; no schema takes long, and none fetches anything."""

from typing import Any

import pytest

from mlx_server import limits
from mlx_server.repair.answers import CheckFailed, schema_errors

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"items": {"enum": ["a", "b"]}}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("value", "schema", "wrong"),
    [
        ({"name": "x", "tags": ["a"]}, PERSON, []),
        ({"tags": ["a", "c"]}, PERSON, ["$.tags[1]: 'c' is not one of", "$: 'name' is a required"]),
        ([1, 1], {"uniqueItems": True}, ["$: [1, 1] has non-unique"]),
        ("abc", {"pattern": "^b"}, ["$: 'abc' does not match"]),
        (1, {"if": {"type": "integer"}, "then": {"minimum": 2}}, ["$: 1 is less than"]),
        (1, False, ["$: False schema"]),
        (1, True, []),
        (3, {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3}, []),
        (
            3,
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "maximum": 3,
                "exclusiveMaximum": True,
            },
            ["$: 3 is greater than or equal"],
        ),
        (1, {"$schema": "of nobody", "type": "string"}, ["$: 1 is not of type"]),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(value: Any, schema: Any, wrong: list[str]) -> None:
    found = schema_errors(value, schema)
    assert all(error.startswith(begin) for error, begin in zip(found, wrong, strict=True)), found


def test_it_is_not_too_much_to_read() -> None:
    schema = {"items": {"const": "x" * 1000}}
    found = schema_errors(list(range(100)), schema)
    assert len(found) == limits.CHECK_ERRORS
    assert all(len(error) <= limits.FIELD_ERROR_CHARACTERS + 1 for error in found)


DOUBLING = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^(a+)+$"},
        {"$ref": "#"},
        {"$ref": "#/$defs/a0", "$defs": {**DOUBLING, "a40": {}}},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "file:///etc/hostname"},
        {"$ref": "#/$defs/nowhere"},
        {"type": 5},
        {"pattern": "("},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_what_can_not_be_found_out_is_said_to_be_so(schema: Any) -> None:
    with pytest.raises(CheckFailed):
        schema_errors("a" * 40 + "!", schema, seconds=1)
