"""Names that `propertyNames` lists are enforced, wherever that means what JSON Schema means."""

import json
from itertools import product
from typing import Any

import jsonschema
import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.formats import check_schema, schema_unenforced
from mlx_server.requests import JsonFormat
from tests.grammars.matching import matcher_of, matches

COLOURS = {"enum": ["red", "dark blue/é", "%7e"]}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}

LISTED: dict[str, dict[str, Any]] = {
    "a literal": {"propertyNames": COLOURS, "additionalProperties": {"type": "integer"}},
    "one name": {"propertyNames": {"const": "red"}, "additionalProperties": {"type": "integer"}},
    "an enumeration": {"propertyNames": {"$ref": "#/$defs/Colour"}, "additionalProperties": POINT},
    "any values": {"propertyNames": {"type": "string", **COLOURS}},
    "a name is required": {"propertyNames": COLOURS, "required": ["red"]},
    "no names": {"propertyNames": {"enum": [1, None]}},
    "a pattern": {"propertyNames": {"pattern": "^r|7"}, "additionalProperties": POINT},
    "a pattern of texts": {"propertyNames": {"type": "string", "pattern": r"^\w+$"}},
    "a pattern and a name": {"propertyNames": {"pattern": "^[a-z]+$"}, "required": ["red"]},
    "a pattern of digits": {"propertyNames": {"pattern": r"^\W*\d"}},
    "beside others": {"allOf": [{"propertyNames": COLOURS}, {"propertyNames": {"const": "red"}}]},
}


def around(inner: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"of": {"type": "object", **inner}},
        "required": ["of"],
        "$defs": {"Colour": {"title": "Colour", "type": "string", **COLOURS}},
    }


VALUES = [1, "a", {"x": 1}, {"x": "a"}]
OBJECTS = [
    {},
    *({name: value} for name, value in product([*COLOURS["enum"], "green", ""], VALUES)),
    *({"red": value, "%7e": value} for value in VALUES),
]


@pytest.mark.parametrize("name", LISTED)
def test_the_names_are_enforced(name: str) -> None:
    asked = around(LISTED[name])
    assert not schema_unenforced(asked)
    check_schema(asked, strict=True, param="response_format")
    matcher = matcher_of(JsonFormat(asked))
    taken = [matches(matcher, json.dumps({"of": one}, ensure_ascii=False)) for one in OBJECTS]
    valid = [jsonschema.Draft202012Validator(asked).is_valid({"of": one}) for one in OBJECTS]
    assert taken == valid
    assert any(valid)
    assert not all(valid)


@pytest.mark.parametrize(
    "inner",
    [
        {"propertyNames": {"pattern": "^(?=a)"}},
        {"propertyNames": {"pattern": "^a", "minLength": 2}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        {"propertyNames": {"enum": ["a"], "minLength": 1}},
        {"propertyNames": COLOURS, "properties": {"red": {"type": "null"}}},
        {"propertyNames": COLOURS, "patternProperties": {"a": {}}},
        {"propertyNames": COLOURS, "minProperties": 1},
        {"propertyNames": False},
        {
            "propertyNames": COLOURS,
            "additionalProperties": {
                "anyOf": [
                    {"type": "null"},
                    {"$ref": "#/properties/of/additionalProperties/anyOf/0"},
                ]
            },
        },
    ],
)
def test_others_are_refused_if_strict(inner: dict[str, Any]) -> None:
    asked = around(inner)
    assert "propertyNames at #/properties/of" in schema_unenforced(asked)
    with pytest.raises(InvalidGrammar, match="#/properties/of/propertyNames"):
        check_schema(asked, strict=True, param="response_format")
    matcher_of(JsonFormat(asked, strict=False))


def test_the_arguments_of_a_call_are_no_listed_names() -> None:
    """They may be written one by one, under any name."""
    found = {"type": "object", "propertyNames": COLOURS}
    assert [*schema_unenforced(found)] == ["propertyNames at #"]
