"""Keywords of schemas that are refused, and those that are reported as not enforced."""

import json
from itertools import product
from typing import Any

import jsonschema
import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import formats
from mlx_server.grammars.formats import check_schema, schema_unenforced, usable_tools
from mlx_server.messages import Tool
from mlx_server.requests import JsonFormat
from tests.grammars.matching import matcher_of, matches, refusal
from tests.tables import cases


@cases
def test_what_is_no_schema_is_refused_by_its_path(found: Any, named: str) -> None:
    assert named in refusal(found)


@cases
def test_references_out_of_the_schema_or_around_in_it_are_refused(found: Any, named: str) -> None:
    assert named in refusal(found)


@cases
def test_what_may_stand_around_a_schema(found: dict[str, Any]) -> None:
    matcher = matcher_of(JsonFormat(found))
    assert matches(matcher, "12")
    assert not matches(matcher, '"12"')


def test_tools_name_the_one_that_is_wrong() -> None:
    tools = [Tool("a"), Tool("b", None, {"properties": {"x": {"type": 5}}}, True)]
    with pytest.raises(InvalidGrammar) as caught:
        formats.usable_tools(tools)
    assert caught.value.param == "tools[1].function.parameters"
    with pytest.raises(InvalidGrammar, match="513 tools"):
        formats.usable_tools([Tool(str(at)) for at in range(513)])
    lenient, strict = Tool("a", parameters={"not": {}}), Tool("a", None, {"not": {}}, True)
    formats.usable_tools([lenient])
    with pytest.raises(InvalidGrammar, match="#/not "):
        formats.usable_tools([strict])


_WORDS = r"^$|(^(?:\S+\s+){0,99}\S+$)"
"""A hundred words at most, of a schema in use: its rows failed with "too many expressions"."""


def test_a_pattern_may_be_too_costly_for_the_length_of_its_text() -> None:
    """tests/hostile/test_limits.py has the other limits of a schema."""
    formats.check_schema({"type": "string", "pattern": _WORDS, "maxLength": 200}, strict=False)
    costly = {"type": "string", "pattern": _WORDS, "maxLength": 5_000}
    named = "#/properties/a/pattern is too costly for such a length: lexer error"
    assert named in refusal({"properties": {"a": costly}})


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        # with an escape the name of a listed member could avoid its schema
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, r'{"\u0061": "x"}'),
        # a mixture of old and new spellings
        ({"prefixItems": [{"type": "string"}], "additionalItems": False}, "[1]"),
    ],
)
def test_what_llguidance_would_take_another_way_is_held(schema: Any, text: str) -> None:
    assert not matches(matcher_of(JsonFormat(schema)), text)


Json = dict[str, Any]
TEXT: Json = {"type": "string"}


def of(properties: Any, **more: Any) -> Json:
    return {"type": "object", "properties": properties, **more}


def deep(levels: int) -> Json:
    return of({"a": deep(levels - 1)}) if levels else {}


@cases
def test_what_can_be_read_is_held(given: Json, held: Json, lost: list[str]) -> None:
    (tool,) = usable_tools([Tool("f", None, given, unenforced=("x",))])
    assert tool == Tool("f", None, held, unenforced=("x", *lost))
    strict = Tool("f", None, given, strict=True)
    with pytest.raises(InvalidGrammar) as caught:
        usable_tools([Tool("g"), strict])
    assert caught.value.param == "tools[1].function.parameters"


def test_one_that_is_too_deep_is_any_object() -> None:
    test_what_can_be_read_is_held(deep(300), {"type": "object"}, ["parameters"])


@pytest.mark.parametrize(
    "parameters",
    [{}, of({"a": TEXT}, required=["a"]), of({"a": {"type": "string", "nullable": True}})],
)
def test_a_schema_is_left_as_it_is(parameters: Json) -> None:
    tool = Tool("f", None, parameters)
    assert usable_tools([tool])[0] is tool


@cases
def test_what_no_grammar_can_say_is_refused_if_strict_and_told_of_if_not(
    found: dict[str, Any], reported: list[str]
) -> None:
    assert list(schema_unenforced(found)) == reported
    check_schema(found, strict=False)
    keyword, at = reported[0].split(" at ")
    assert f"{at}/{keyword} " in refusal(found, strict=True)
    matcher_of(JsonFormat(found, strict=False))


@cases
def test_what_says_nothing_or_can_be_said_is_strict(found: dict[str, Any]) -> None:
    check_schema(found, strict=True)
    assert schema_unenforced(found) == ()
    matcher_of(JsonFormat(found))


def tagged(value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": value}}, "required": ["kind"]}


CAT, DOG = tagged("cat"), tagged("dog")
NULL, A_TEXT = {"type": "null"}, {"type": "string"}


@pytest.mark.parametrize(
    ("options", "is_held"),
    [
        ([A_TEXT, NULL], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": "1"}, {"enum": ["2", 3]}, NULL], True),
        ([{"const": 1}, {"enum": [2, 3.5]}, NULL], False),  # llguidance compares no listed numbers
        ([{"const": 1}, {"enum": [2, 1.0]}], False),
        ([{"const": "1"}, {"const": 1}, {"const": True}], True),
        ([{"type": "string", "enum": ["a", None]}, NULL], True),
        ([{"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, CAT], True),
        ([{"type": "array"}, {"const": [1]}], False),
        ([True, NULL], False),
        ([False, NULL], True),
        ([{"not": {}}, {"minLength": 2}], False),
        ([CAT, DOG, NULL], True),
        ([CAT, DOG, {"const": {}}], True),
        ([CAT, {"$ref": "#/$defs/dog"}], True),
        ([CAT, {"$ref": "#/$defs/cat"}], False),
        ([{"$ref": "#/$defs/dog"}, {"allOf": [{"$ref": "#/$defs/cat"}]}], True),
        ([CAT, {**DOG, "required": []}], False),
        ([CAT, {**DOG, "type": ["object", "null"]}], True),
        ([*(tagged(str(n)) for n in range(400)), *({"const": str(n)} for n in range(400))], True),
        ([*(tagged(str(n)) for n in range(400)), tagged("7")], False),
    ],
    ids=lambda value: str(value)[:60],
)
def test_one_of_is_held_where_no_value_follows_two_options(options: Any, is_held: bool) -> None:
    schema = {"oneOf": options, "$defs": {"cat": CAT, "dog": DOG}}
    reported = [each for each in schema_unenforced(schema) if each.startswith("oneOf")]
    assert reported == ([] if is_held else ["oneOf at #"])


@cases
def test_bounds_that_doubles_have_are_exact(bounds: Any, taken: int, refused: int) -> None:
    asked = {"type": "integer", **bounds}
    assert not schema_unenforced(asked)
    matcher = matcher_of(JsonFormat(asked))
    assert (matches(matcher, str(taken)), matches(matcher, str(refused))) == (True, False)


@pytest.mark.parametrize(
    "bounds",
    [{"minimum": 2**53 + 1}, {"exclusiveMaximum": -(2**53)}, {"exclusiveMinimum": 2.0**53}],
)
def test_other_bounds_are_reported(bounds: dict[str, Any]) -> None:
    asked = {"type": "integer", **bounds}
    assert schema_unenforced(asked) == (f"{next(iter(bounds))} at #",)
    matcher_of(JsonFormat(asked, strict=False))


COLOURS = {"enum": ["red", "dark blue/é", "%7e"]}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}

LISTED: dict[str, dict[str, Any]] = {
    "a literal": {"propertyNames": COLOURS, "additionalProperties": {"type": "integer"}},
    "one name": {"propertyNames": {"const": "red"}, "additionalProperties": {"type": "integer"}},
    "an enumeration": {"propertyNames": {"$ref": "#/$defs/Colour"}, "additionalProperties": POINT},
    "any values": {"propertyNames": {"type": "string", **COLOURS}},
    "a name is required": {"propertyNames": COLOURS, "required": ["red"]},
    "a pattern": {"propertyNames": {"pattern": "^r|7"}, "additionalProperties": POINT},
    "a pattern of texts": {"propertyNames": {"type": "string", "pattern": r"^\w+$"}},
    "a pattern and a name": {"propertyNames": {"pattern": "^[a-z]+$"}, "required": ["red"]},
    "a pattern of digits": {"propertyNames": {"pattern": r"^\W*\d"}},
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
    check_schema(asked, strict=True, param="response_format")
    matcher = matcher_of(JsonFormat(asked))
    taken = [matches(matcher, json.dumps({"of": one}, ensure_ascii=False)) for one in OBJECTS]
    valid = [jsonschema.Draft202012Validator(asked).is_valid({"of": one}) for one in OBJECTS]
    assert taken == valid
    assert any(valid)
    assert not all(valid)


@cases
def test_other_names_are_reported(inner: dict[str, Any]) -> None:
    asked = around(inner)
    assert "propertyNames at #/properties/of" in schema_unenforced(asked)
    matcher_of(JsonFormat(asked, strict=False))
