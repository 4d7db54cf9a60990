"""The shortest instances of a schema's parts, which its own validator accepts."""

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from mlx_server.schemas.compiler import BYTES, LIMITS
from mlx_server.schemas.grammar import text_of
from mlx_server.schemas.shortest import ShortestInstances

NODE = {"$ref": "#/$defs/node"}
SCHEMAS: list[tuple[Any, str]] = [
    (True, "0"),
    ({"type": "string", "minLength": 3}, '"aaa"'),
    ({"type": "string", "pattern": "^(foo|bar!)$"}, '"foo"'),
    ({"type": "integer", "minimum": 1000}, "1000"),
    ({"type": "integer", "minimum": 1000, "multipleOf": 35}, "1015"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.1"),
    ({"enum": ["long text", 12, None]}, "12"),
    ({"type": "array", "minItems": 2, "items": {"const": "x"}}, '["x","x"]'),
    ({"type": "array", "minItems": 2, "prefixItems": [{"const": 1}], "items": {}}, "[1,0]"),
    ({"required": ["b", "a"], "properties": {"a": {}, "b": {}, "c": {}}, "type": "object"},
     '{"a":0,"b":0}'),
    ({"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}},
     '{"a0":null}'),
    ({"allOf": [{"$ref": "#/$defs/a"}, {"required": ["b"]}],
      "$defs": {"a": {"type": "object", "properties": {"a": {}}, "required": ["a"]}}},
     '{"a":0,"b":0}'),
    ({"oneOf": [{"type": "string", "minLength": 9}, {"type": "null"}]}, "null"),
    ({"$defs": {"node": {"type": "object", "required": ["next"], "properties":
      {"next": {"anyOf": [NODE, {"type": "null"}]}}}}, **NODE}, '{"next":null}'),
]  # fmt: skip


def _members(*names: str) -> dict[str, Any]:
    return {"properties": {name: {} for name in names}, "required": [*names], "type": "object"}


_BASES = {"$defs": {"base": _members("b", "t"), "other": _members("z", "t")}}
_BASE = {"$ref": "#/$defs/base"}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [_BASE, _members("t", "c")], **_BASES},
        {"allOf": [{"allOf": [_BASE, _members("m")]}, _members("c")], **_BASES},
        {**_members("c"), "allOf": [_BASE], **_BASES},
        {"allOf": [_BASE], **_members("c"), **_BASES},
        {"allOf": [{"$ref": "#/$defs/other"}], **_BASE, **_BASES},
        {**_BASE, "allOf": [{"$ref": "#/$defs/other"}], **_BASES},
    ],
)
def test_its_members_come_in_the_order_in_which_the_grammar_has_them(schema: Any) -> None:
    text = ShortestInstances(schema).text(schema)
    assert text is not None
    matcher = LLMatcher(BYTES, f"start: {text_of(schema)}", log_level=0, limits=LIMITS)
    assert matcher.validate_tokens([*text.encode()]) == len(text)


@pytest.mark.parametrize(("schema", "text"), SCHEMAS)
def test_the_shortest_instance(schema: Any, text: str) -> None:
    assert ShortestInstances(schema).text(schema) == text
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}},
         "$ref": "#/$defs/a"},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "array", "minItems": 10**9},
        {"$ref": "#/$defs/nowhere"},
    ],
)  # fmt: skip
def test_without_an_instance(schema: Any) -> None:
    found = ShortestInstances(schema).text(schema)
    assert found is None or schema == {"$ref": "#/$defs/nowhere"}


def test_an_instance_that_depends_on_an_open_one_is_improved() -> None:
    inner = {"anyOf": [{"$ref": "#"}, {"const": "a long text"}]}
    within = {"type": "object", "properties": {"b": inner}, "required": ["b"]}
    instances = ShortestInstances({"anyOf": [within, {"const": 0}]})
    assert (instances.text(inner_of(instances)), instances.text(instances.schemas[0])) == ("0", "0")


def inner_of(instances: ShortestInstances) -> Any:
    return next(schema for schema in instances.schemas if {"$ref": "#"} in schema.get("anyOf", ()))
