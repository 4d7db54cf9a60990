"""The keywords that arguments are not held to where they are not written as JSON."""

from typing import Any

import pytest

from mlx_server.grammars.arguments import unsupported_as_text, unsupported_one_by_one
from mlx_server.messages import Tool

PATTERN = {"type": "string", "pattern": r"^(?=a)b"}


@pytest.mark.parametrize(
    ("schema", "one_by_one", "as_text"),
    [
        ({"properties": {"a": {"pattern": "^a+$"}}}, [], []),
        ({"patternProperties": {"^a": {}}}, ["patternProperties"], ["patternProperties"]),
        (
            {"properties": {"a": {}, "b": {}}, "minProperties": 2},
            *(["minProperties"], ["minProperties"]),
        ),
        ({"properties": {"a": PATTERN}}, [], ["pattern"]),
        ({"properties": {"a": {"$ref": "#/$defs/p"}}, "$defs": {"p": PATTERN}}, [], ["pattern"]),
        ({"properties": {"a": {"anyOf": [PATTERN, {}]}}}, [], ["pattern"]),
        ({"properties": {"a": {"items": PATTERN}}}, [], []),
    ],
)
def test_keywords_are_reported_by_name(
    schema: dict[str, Any], one_by_one: list[str], as_text: list[str]
) -> None:
    tool = Tool("f", "", schema)
    assert [found.keyword for found in unsupported_one_by_one(tool)] == one_by_one
    assert [found.keyword for found in unsupported_as_text(tool)] == as_text
