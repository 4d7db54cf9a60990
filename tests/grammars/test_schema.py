"""Keywords of schemas that are refused, and those that are reported as not enforced."""

import json
from typing import Any

import jsonschema
import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import schema
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.requests import JsonFormat
from mlx_server.schemas import members
from mlx_server.schemas.grammar import on_one_line, simplify
from mlx_server.schemas.report import unsupported_keywords
from mlx_server.schemas.view import View
from tests.grammars.matching import compiled, matcher_of, matches


def refusal(found: Any, *, strict: bool = False) -> str:
    with pytest.raises(InvalidGrammar) as caught:
        schema.check(found, strict=strict, param="response_format")
    assert caught.value.param == "response_format"
    assert caught.value.code == "invalid_json_schema"
    assert caught.value.status == 400
    return caught.value.message


def within(inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a/b": inner}}


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"type": "strin"}, "#/type"),
        ({"type": []}, "#/type"),
        ({"type": {}}, "#/type"),
        ({"properties": []}, "#/properties"),
        ({"properties": {"a": 5}}, "#/properties"),
        ({"required": "a"}, "#/required"),
        ({"required": [1]}, "#/required"),
        ({"required": True}, "#/required"),
        ({"enum": []}, "#/enum"),
        ({"enum": "a"}, "#/enum"),
        ({"anyOf": []}, "#/anyOf"),
        ({"allOf": {}}, "#/allOf"),
        ({"items": 5}, "#/items"),
        ({"minLength": -1}, "#/minLength"),
        ({"maxItems": 1.5}, "#/maxItems"),
        ({"maxItems": True}, "#/maxItems"),
        ({"minimum": "1"}, "#/minimum"),
        ({"multipleOf": 0}, "#/multipleOf"),
        ({"minimum": 10**400}, "#/minimum"),
        ({"default": float("inf")}, "#/default"),
        ({"pattern": 5}, "#/pattern"),
        ({"$ref": 5}, "#/$ref"),
        (within({"pattern": 5}), "#/properties/a~1b/pattern"),
        ({"$defs": {"unused": {"type": 7}}}, "#/$defs/unused/type"),
        ({"const": "\x00"}, "#/const"),
        (within({"maxLength": 10**19}), "#/properties/a~1b/maxLength can't be accepted"),
        (within({"minLength": 10**19}), "#/properties/a~1b/minLength can't be accepted"),
        (within({"multipleOf": 10**6 + 1}), "#/properties/a~1b/multipleOf is"),
        (within({"pattern": "(" * 61 + ")" * 61}), "#/properties/a~1b/pattern"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater"),
        ({"type": "number", "exclusiveMinimum": 5, "maximum": 5}, "inimum (5)"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength (5) is greater"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}},
                "required": ["a"],
            },
            "required property 'a' is unsatisfiable",
        ),
        ({"title": "\ud800"}, "surrogate"),
        (5, "must be an object"),
        (None, "must be an object"),
        (False, "no value"),
    ],
)
def test_what_is_no_schema_is_refused_by_its_path(found: Any, named: str) -> None:
    assert named in refusal(found)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"$ref": "http://localhost:1/schema"}, "outside the schema"),
        ({"$ref": "other.json#/a"}, "outside the schema"),
        ({"$ref": "file:///etc/passwd"}, "outside the schema"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "outside the schema"),
        ({"not": {"$ref": "http://localhost:1/schema"}}, "#/not/$ref"),
        (within({"$ref": "#/$defs/nowhere"}), "#/properties/a~1b/$ref"),
        ({"$ref": "#/type", "type": "object"}, "not a schema"),
        ({"$ref": "#nobody"}, "no $anchor"),
        ({"$ref": "#"}, "itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "itself"),
        ({"allOf": [{"anyOf": [{"$ref": "#"}]}]}, "itself"),
        (
            {"$defs": {"a": {"$id": "http://x/", "items": {"$ref": "#"}}}, "$ref": "#/$defs/a"},
            "$id",
        ),
    ],
)
def test_references_out_of_the_schema_or_around_in_it_are_refused(found: Any, named: str) -> None:
    assert named in refusal(found)


@pytest.mark.parametrize(
    "found",
    [
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}},
        {"$ref": "#/$defs/a%25b", "$defs": {"a%b": {"type": "integer"}}},
        {"$ref": "#whole", "$defs": {"a": {"$anchor": "whole", "type": "integer"}}},
        {"$ref": "#whole", "definitions": {"a": {"$id": "#whole", "type": "integer"}}},
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"type": "integer"}}}},
        {"$id": "http://a/b", "$schema": "evil://x", "type": "integer"},
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"},
        {"x-guidance": {"lenient": True, "whitespace_pattern": "x"}, "type": "integer"},
    ],
)
def test_what_may_stand_around_a_schema(found: dict[str, Any]) -> None:
    matcher = matcher_of(JsonFormat(found))
    assert matches(matcher, "12")
    assert not matches(matcher, '"12"')


@pytest.mark.parametrize(
    ("found", "reported"),
    [
        ({"not": {"type": "string"}}, ["not at #"]),
        ({"if": {}, "then": {"type": "string"}}, ["if at #", "then at #"]),
        (within({"uniqueItems": True}), ["uniqueItems at #/properties/a~1b"]),
        ({"items": {"contains": {"type": "null"}}}, ["contains at #/items"]),
        ({"propertyNames": {"minLength": 2}}, ["propertyNames at #"]),
        ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired at #"]),
        ({"unevaluatedProperties": False}, ["unevaluatedProperties at #"]),
        ({"type": "string", "format": "color"}, ["format at #"]),
        ({"format": "unknown"}, ["format at #"]),
        (within({"pattern": "^(?!a)"}), ["pattern at #/properties/a~1b"]),
        ({"patternProperties": {"(?<=a)b": {}}}, ["patternProperties at #"]),
        (within({"pattern": "(a"}), ["pattern at #/properties/a~1b"]),
        (within({"patternProperties": {"[a": {}}}), ["patternProperties at #/properties/a~1b"]),
        (within({"minimum": 1e-300}), ["minimum at #/properties/a~1b"]),
        (within({"exclusiveMaximum": -1e20}), ["exclusiveMaximum at #/properties/a~1b"]),
        ({"multipleOf": 1e-300}, ["multipleOf at #"]),
        ({"const": 2**53 + 1}, ["const at #"]),
        ({"enum": [[{"a": -(2**60) - 1}]]}, ["enum at #"]),
        ({"minProperties": 2}, ["minProperties at #"]),
        ({"properties": {"a": {}}, "maxProperties": 1}, ["maxProperties at #"]),
        (
            {"allOf": [{"minProperties": 1}, {"properties": {"a": {}}}]},
            ["minProperties at #/allOf/0"],
        ),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, ["oneOf at #"]),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}, "unused": {"not": {}}}},
            ["not at #/$defs/a"],
        ),
    ],
)
def test_what_no_grammar_can_say_is_refused_if_strict_and_told_of_if_not(
    found: dict[str, Any], reported: list[str]
) -> None:
    assert list(schema.unenforced(found)) == reported
    schema.check(found, strict=False)
    keyword, at = reported[0].split(" at ")
    assert f"{at}/{keyword} " in refusal(found, strict=True)
    matcher_of(JsonFormat(found, strict=False))


@pytest.mark.parametrize(
    "found",
    [
        {"uniqueItems": False},
        {"unevaluatedProperties": True, "propertyNames": {"type": "string"}},
        {"then": {}, "minContains": 2, "dependentRequired": {}},
        {"type": "integer", "format": "int32"},
        {"title": "a", "description": "b", "default": 1, "examples": [1], "deprecated": True},
        {"type": "object", "required": ["a"], "minProperties": 2},
        {"properties": {"a": {}}, "additionalProperties": False, "minProperties": 1},
        {"properties": {"a": {}}, "additionalProperties": False, "maxProperties": 1},
        {"minimum": -(2**53), "maximum": 2**53},
        {"oneOf": [{"type": "string"}, {"type": "null"}]},
        {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]},
        {"maxLength": 2.0},
        {"maxLength": 2**31},
        {"minimum": 5, "maximum": 3},  # texts follow it
        {"type": "integer", "minimum": 5, "maximum": 5},
        {"minimum": -1e17, "exclusiveMaximum": 1e17, "multipleOf": 1e-9},
        {"minimum": -1e-60, "maximum": 1e-60},
    ],
)
def test_what_says_nothing_or_can_be_said_is_strict(found: dict[str, Any]) -> None:
    schema.check(found, strict=True)
    assert schema.unenforced(found) == ()
    matcher_of(JsonFormat(found))


def test_one_of_may_refer_to_objects_that_a_member_tells_apart() -> None:
    def tagged(tag: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": tag}}, "required": ["kind"]}

    found = {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"allOf": [{"$ref": "#/$defs/dog"}]}],
        "$defs": {"cat": tagged("cat"), "dog": tagged("dog")},
    }
    matcher = matcher_of(JsonFormat(found))
    assert matches(matcher, '{"kind": "dog"}')
    assert not matches(matcher, '{"kind": "cow"}')
    found["$defs"]["dog"] = tagged("cat")  # type: ignore[index]
    assert schema.unenforced(found) == ("oneOf at #",)


@pytest.mark.parametrize("text", [r'{"\u0061": "x"}', '{"b": "x", "\\u0061": "x"}'])
def test_a_member_can_not_be_spelled_around_its_schema(text: str) -> None:
    found = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not jsonschema.Draft202012Validator(found).is_valid(json.loads(text))
    assert not matches(matcher_of(JsonFormat(found)), text)


def test_what_llguidance_would_leave_out_of_old_and_new_spellings_mixed_is_kept() -> None:
    found = {"prefixItems": [{"type": "string"}], "additionalItems": False}
    assert not matches(matcher_of(JsonFormat(found)), "[1]")


def test_tools_name_the_one_that_is_wrong() -> None:
    tools = [Tool("a"), Tool("b", parameters={"properties": {"x": {"type": 5}}})]
    with pytest.raises(InvalidGrammar) as caught:
        schema.check_tools(tools)
    assert caught.value.param == "tools[1].function.parameters"
    with pytest.raises(InvalidGrammar, match="129 tools"):
        schema.check_tools([Tool(str(at)) for at in range(129)])
    lenient, strict = Tool("a", parameters={"not": {}}), Tool("a", None, {"not": {}}, True)
    schema.check_tools([lenient])
    with pytest.raises(InvalidGrammar, match="#/not "):
        schema.check_tools([strict])


SHOP: dict[str, Any] = {
    "type": "object",
    "allOf": [{"$ref": "#/$defs/base"}],
    "properties": {
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "again": {"$ref": "#"},
        "first": {"$ref": "#/properties/items/items", "description": "the first"},
        "count": {"type": "integer"},
    },
    "required": ["items"],
    "$defs": {
        "base": {"properties": {"id": {"type": "string"}}, "required": ["id"]},
        "item": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/item/$defs/deep"}],
                 "$defs": {"deep": {"type": "array", "items": {"$ref": "#tree"}}}},
        "tree": {"$anchor": "tree", "type": "object", "maxProperties": 0},
    },
}  # fmt: skip


def test_members_are_found_through_references_and_all_of() -> None:
    assert list(members.properties_of(SHOP)) == ["items", "again", "first", "count", "id"]
    assert members.required_of(SHOP) == {"items", "id"}
    assert members.properties_of(True) == {}


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("items", '["a", [{}, {}]]', '["a", [1]]'),
        ("again", '{"id": "x", "items": ["a"]}', '{"id": "x", "items": [1]}'),
        ("first", "[{}]", "{}"),
        ("count", "1", '"1"'),
        ("id", '"1"', "1"),
    ],
)
def test_a_member_is_a_schema_of_its_own(key: str, good: str, bad: str) -> None:
    alone = members.member(SHOP, key)
    matcher = matcher_of(JsonFormat(alone))
    assert matches(matcher, good)
    assert not matches(matcher, bad)
    validator = jsonschema.Draft202012Validator(alone)
    assert validator.is_valid(json.loads(good))
    assert not validator.is_valid(json.loads(bad))


def test_a_member_carries_no_more_than_it_refers_to() -> None:
    assert members.member(SHOP, "count") == {"type": "integer"}
    assert members.member(SHOP, "nobody") == {}
    assert members.member({"additionalProperties": {"type": "null"}}, "x") == {"type": "null"}


def test_the_gaps_of_a_schema_are_those_of_what_it_uses_wherever_that_stands() -> None:
    found = {"properties": {"a": {"$ref": "#/x/y"}}, "x": {"y": {"uniqueItems": True}}}
    view = View(found)
    gaps = unsupported_keywords(view)
    assert [str(gap) for gap in gaps] == ["uniqueItems at #/x/y"]
    simplify(view, gaps)
    assert found == {"properties": {"a": {"$ref": "#/x/y"}}, "x": {"y": {}}}


def _deep(depth: int) -> dict[str, Any]:
    return {"properties": {"a": _deep(depth - 1)}} if depth else {}


_WORDS = r"^$|(^(?:\S+\s+){0,99}\S+$)"
"""A hundred words at most, of a schema in use: its rows failed with "too many expressions"."""


@pytest.mark.parametrize(
    ("within_limit", "beyond", "named"),
    [
        ({"const": "x" * 262_000}, {"const": "x" * 262_200}, "bytes"),
        (_deep(48), _deep(49), "deeper than 48"),
        ({"examples": [[]] * 19_990}, {"examples": [[]] * 20_000}, "20000 objects"),
        (
            {"properties": {str(n): {} for n in range(500)}},
            {"properties": {str(n): {} for n in range(501)}},
            "#/properties can't be accepted",
        ),
        ({"enum": [0] * 10_000}, {"enum": [0] * 10_001}, "#/enum can't be accepted"),
        ({"minLength": 10_000}, {"minLength": 10_001}, "#/minLength can't be accepted"),
        ({"minItems": 10_000}, {"minItems": 10_001}, "#/minItems can't be accepted"),
        ({"pattern": "x" * 2_000}, {"pattern": "x" * 2_001}, "#/pattern"),
        ({"pattern": "x{10000}"}, {"pattern": "x{0,10001}"}, "#/pattern"),
        ({"pattern": "(x{200}){200}"}, {"pattern": "(x{300}){200}"}, "#/pattern"),
        (
            {"type": "string", "pattern": _WORDS, "maxLength": 200},
            {"properties": {"a": {"type": "string", "pattern": _WORDS, "maxLength": 5_000}}},
            "#/properties/a/pattern is too costly for such a length: lexer error",
        ),
        ({"multipleOf": 9_999}, {"items": {"multipleOf": 10_001}}, "multipleOf"),
        (
            {"items": {"multipleOf": 99}, "contains": {"multipleOf": 0.98}},
            {"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]},
            "multipleOf",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_limits_are_where_they_are_said_to_be(within_limit: Any, beyond: Any, named: str) -> None:
    schema.check(within_limit, strict=False)
    assert named in refusal(beyond)


@pytest.mark.parametrize(
    ("text", "is_on_one_line"),
    [
        ('{"a":1}', True),
        ('{"a": 1 }', True),
        ('{\n  "a": 1\n}', False),
        ('{"a":  1}', False),
    ],
)
def test_white_space_is_the_owners_choice(text: str, is_on_one_line: bool) -> None:
    lark = Lark()
    source = lark.source(lark.json({"properties": {"a": {"type": "integer"}}, "type": "object"}))
    assert matches(compiled(source), text) is (is_on_one_line or "\n" in text)
    assert matches(compiled(on_one_line(source)), text) is is_on_one_line


def test_options_that_may_overlap_are_kept_as_those_of_any_of() -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"enum": [1, "a"]}]}
    assert schema.unenforced(overlapping) == ("oneOf at #",)
    matcher = matcher_of(JsonFormat(overlapping, strict=False))
    assert [text for text in ("1", "2", '"a"', '"b"', "{}") if matches(matcher, text)] == [
        *("1", "2", '"a"')
    ]
