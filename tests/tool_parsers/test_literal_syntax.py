"""Python's values follow their schema."""

from typing import Any

import pytest

from tests.tool_parsers.block_grammars import allowed

pytestmark = pytest.mark.tables


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["'a'", '"a\\"b\\n"', '""', "'\\x41'"], ["a", "'a", "'\\ud800'"]),
        ({"type": ["boolean", "null"]}, ["True", "false", "None", "null"], ["'x'", "1"]),
        ({"enum": ["a b", 1.5, True]}, ["'a b'", '"a b"', "1.5", "True"], ["1", "'a'"]),
        ({"type": "integer", "maximum": 9}, ["7", "-12"], ["10", "7.0"]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, ["[]", "[None]"], ["[1]"]),
        ({"type": "object"}, ["{}", "{'a': [1, {'b': None}]}"], ["[]", "{1}"]),
        ({"type": "object", "properties": {"u": {}}, "required": ["w"]}, ['{"w": 1}'], ["{}"]),
        ({"type": "object", "properties": {"u": False}}, ["{}", '{"w": 1}'], ['{"u": 1}']),
        ({"type": "integer", "enum": [1, "a"]}, ["1"], ["'a'"]),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1, 2]"], ["[]"]),
        ({"type": "string", "minLength": 1.0}, ["'a'"], ["''"]),
        ({"anyOf": [{"enum": ["aa", "b"], "maxLength": 1}, {"const": 1}]}, ['"b"', "1"], ['"aa"']),
        ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ["'aa'", '"ab"']),
        ({"type": "array", "uniqueItems": False, "items": {"const": 1}}, ["[1]"], ["[2]"]),
    ],
)
def test_python_follows_a_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    texts = [f"[f(x={value})]<|tool_call_end|>" for value in right + wrong]
    expected = [True] * len(right) + [False] * len(wrong)
    assert allowed("lfm2", {"x": schema}, *texts) == expected
