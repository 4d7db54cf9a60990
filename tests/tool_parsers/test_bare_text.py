"""Text without quotes is what its schema allows, and is read as nothing else."""

from typing import Any

import pytest

from tests.tool_parsers.block_grammars import allowed, qwen

pytestmark = pytest.mark.tables


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["", "a\nb", "7", "null", "</p>"], ["</parameter>", "</function>"]),
        ({"type": "integer"}, ["7", "-1"], ["7.5", "x", '"7"', ""]),
        ({"type": "boolean"}, ["true", "False"], ["yes", "1"]),
        ({"type": ["string", "null"], "maxLength": 3}, ["abc", "null", "a b"], ["abcd"]),
        ({"enum": ["a", "b c"]}, ["a", "b c"], ["b", '"a"', "A"]),
        ({"enum": [1, None, "x"]}, ["1", "null", "x"], ["2", "xx"]),
        ({"type": ["string", "integer"], "enum": ["1", 2]}, ["2"], ["1"]),
        ({"type": "string", "pattern": "^a+$"}, ["aa"], ["", "ab"]),
        ({"type": "string", "pattern": "b|c$"}, ["abx", "xc"], ["", "xcx"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]"], ["[1.5]", "1, 2"]),
        ({"type": ["string", "object"]}, ['{"a": 1}', "a {"], ["{a}", " {"]),
        ({"type": ["string", "integer"]}, ["7", "7 a", "7.5"], []),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, ["ab"], ["", "a"]),
        ({"type": "string", "anyOf": [{"const": "a"}, {"pattern": "^b"}]}, ["a", "bc"], ["ab", ""]),
        ({"enum": ["a", "bb"], "minLength": 2}, ["bb"], ["a"]),
        ({"type": ["string", "null"], "format": "ipv4"}, ["0.0.0.0", "null"], ["0.0.0", ""]),
    ],
)
def test_bare_values_follow_their_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    texts = [qwen(value) for value in right + wrong]
    expected = [True] * len(right) + [False] * len(wrong)
    assert allowed("qwen3_coder", {"x": schema}, *texts) == expected
