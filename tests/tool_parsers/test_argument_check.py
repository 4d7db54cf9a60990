"""What a finished call lacks, as far as its tool's schema is plain."""

from typing import Any

import pytest

from mlx_server.tool_parsers.calls import argument_errors

SCHEMA: dict[str, Any] = {
    "properties": {
        "n": {"type": "integer"},
        "size": {"type": ["number", "integer", "null"]},
        "word": {"type": "string", "pattern": "^(a+)+$"},
        "any": {},
    },
    "required": ["n"],
}


@pytest.mark.parametrize(
    ("arguments", "errors"),
    [
        ({"n": 1, "size": 0.5, "word": "a", "any": [1], "other": {}}, {}),
        ({"n": 2.0, "size": None}, {}),
        ({}, {"n": "it is required"}),
        ({"n": "1"}, {"n": "it should be of type integer"}),
        ({"n": True}, {"n": "it should be of type integer"}),
        ({"n": 1, "size": "x"}, {"size": "it should be of type null or number"}),
        ({"n": 1, "word": "b" * 99}, {}),
    ],
)
def test_required_arguments_and_types_are_checked_and_no_pattern(
    arguments: dict[str, Any], errors: dict[str, str]
) -> None:
    assert dict(argument_errors(arguments, SCHEMA)) == errors
