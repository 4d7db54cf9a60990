"""Keywords of schemas that are refused, and those that are reported as not enforced."""

from typing import Any

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import formats
from mlx_server.grammars.formats import usable_tools
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
