"""A schema's grammar: its white space, and what llguidance would take another way."""

import json

import jsonschema
import pytest

from mlx_server.grammars.grammar import text_of
from mlx_server.grammars.view import Schema
from mlx_server.requests import JsonFormat
from tests.grammars.matching import matcher_of, matches


@pytest.mark.parametrize("text", [r'{"\u0061": "x"}', '{"b": "x", "\\u0061": "x"}'])
def test_a_member_can_not_be_spelled_around_its_schema(text: str) -> None:
    found = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not jsonschema.Draft202012Validator(found).is_valid(json.loads(text))
    assert not matches(matcher_of(JsonFormat(found)), text)


def test_what_llguidance_would_leave_out_of_old_and_new_spellings_mixed_is_kept() -> None:
    found = {"prefixItems": [{"type": "string"}], "additionalItems": False}
    assert not matches(matcher_of(JsonFormat(found)), "[1]")


NAMED = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}


@pytest.mark.parametrize("options", [[NAMED], [{"type": "null"}, NAMED]])
def test_a_choice_that_is_required_anyway_is_left_out(options: list[Schema]) -> None:
    found = {"allOf": [NAMED], "anyOf": options}
    assert "anyOf" not in text_of(found)
    assert matches(matcher_of(JsonFormat(found)), '{"a": "x"}')
    assert not matches(matcher_of(JsonFormat(found)), '{"a": "y"}')


def test_a_choice_that_decides_is_kept() -> None:
    found = {"allOf": [{"type": "string"}], "anyOf": [{"const": "x"}]}
    assert not matches(matcher_of(JsonFormat(found)), '"y"')


def test_a_choice_to_which_a_reference_leads_is_kept() -> None:
    inner = {"allOf": [NAMED], "anyOf": [NAMED]}
    found = {"properties": {"p": inner, "q": {"$ref": "#/properties/p/anyOf/0"}}}
    assert matches(matcher_of(JsonFormat(found)), '{"p": {"a": "x"}, "q": {"a": "x"}}')
    assert not matches(matcher_of(JsonFormat(found)), '{"q": {"a": "y"}}')
