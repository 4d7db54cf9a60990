"""The rule of a value allows what its schema does, of the types that are asked for."""

import json
from typing import Any

import pytest

from mlx_server.grammars.lark import Lark
from mlx_server.schemas.values import ValueSchema
from mlx_server.schemas.view import View
from mlx_server.tool_parsers.value_rules import json_rule
from tests.walks import accepts

pytestmark = pytest.mark.tables

LONG = 41 * "9"
WORD = {"$defs": {"word": {"enum": ["a", "b"]}}, "$ref": "#/$defs/word"}
EITHER = {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "types", "right", "wrong"),
    [
        (
            {"type": "number"},
            (),
            ["0", "-0.5", "1e99", LONG, "1E-9"],
            ["01", f"{LONG}9", ".5", "1e"],
        ),
        ({"type": "number", "minimum": 3}, (), ["3", "4.5"], ["2", "-1"]),
        ({"type": "integer"}, (), ["5", "-1"], ["1.5", "a"]),
        ({}, ("number",), ["1.5"], ['"a"', "null"]),
        ({}, ("string", "null"), ['"a"', "null"], ["1", "[]"]),
        (EITHER, (), ['"ab"', "7", "null"], ['"abc"', "1.5", "[]"]),
        (EITHER, ("string",), ['"ab"'], ['"abc"', "7", "null"]),
        (EITHER, ("integer", "null"), ["7", "null"], ['"a"']),
        (WORD, (), ['"a"'], ['"c"']),
        (WORD, ("string",), ['"a"'], ['"c"', "1"]),
        ({"enum": [1, "a"]}, ("string",), ['"a"'], ["1"]),
        ({"const": "</x>\n"}, (), [json.dumps("</x>\n")], ['"x"']),
    ],
)
def test_it_allows_these_values(
    schema: dict[str, Any], types: tuple[str, ...], right: list[str], wrong: list[str]
) -> None:
    lark = Lark()
    grammar = lark.source(json_rule(ValueSchema(schema, View(schema)), lark, *types)).source
    assert [text for text in (*right, *wrong) if accepts("plain", grammar, text)] == right
