"""Keywords that no grammar can enforce are found, each with its path."""

from typing import Any

import pytest

from mlx_server.grammars.formats import check_schema, schema_unenforced
from mlx_server.grammars.grammar import simplify, unsupported_keywords
from mlx_server.grammars.view import View
from mlx_server.requests import JsonFormat
from tests.grammars.matching import matcher_of, matches, refusal, within


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
    assert list(schema_unenforced(found)) == reported
    check_schema(found, strict=False)
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
    check_schema(found, strict=True)
    assert schema_unenforced(found) == ()
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
    assert schema_unenforced(found) == ("oneOf at #",)


def test_the_gaps_of_a_schema_are_those_of_what_it_uses_wherever_that_stands() -> None:
    found = {"properties": {"a": {"$ref": "#/x/y"}}, "x": {"y": {"uniqueItems": True}}}
    view = View(found)
    gaps = unsupported_keywords(view)
    assert [str(gap) for gap in gaps] == ["uniqueItems at #/x/y"]
    simplify(view, gaps)
    assert found == {"properties": {"a": {"$ref": "#/x/y"}}, "x": {"y": {}}}


def test_options_that_may_overlap_are_kept_as_those_of_any_of() -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"enum": [1, "a"]}]}
    assert schema_unenforced(overlapping) == ("oneOf at #",)
    matcher = matcher_of(JsonFormat(overlapping, strict=False))
    assert [text for text in ("1", "2", '"a"', '"b"', "{}") if matches(matcher, text)] == [
        *("1", "2", '"a"')
    ]
