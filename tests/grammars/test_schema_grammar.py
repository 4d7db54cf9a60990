"""A schema's grammar: its white space, and what llguidance would take another way."""

import json

import jsonschema
import pytest

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
