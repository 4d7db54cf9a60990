"""Keywords of schemas that are refused, and those that are reported as not enforced."""

from typing import Any

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import formats
from mlx_server.messages import Tool
from mlx_server.requests import JsonFormat
from tests.grammars.matching import matcher_of, matches, refusal, within
from tests.tables import cases


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"type": "strin"}, '#/type can\'t be accepted: "strin" is not one of array, boolean'),
        ({"properties": {"a": 5}}, "#/properties/a can't be accepted: 5 is not a schema"),
        ({"maxItems": True}, "#/maxItems"),
        ({"minimum": 10**400}, "a number too large"),
        ({"default": float("inf")}, "has Infinity, a number too large"),
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
            "(#/properties/a: minimum (5) is greater",
        ),
        ({"title": "\ud800"}, "surrogate"),
        (5, "must be an object"),
        (None, "must be an object"),
        (False, "no value"),
    ],
)
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
