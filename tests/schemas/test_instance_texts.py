"""The texts that may continue or end an instance of a schema."""

from typing import Any

import pytest

from mlx_server.schemas.instance_texts import MOST_SUFFIXES, InstanceTexts


def texts_of(schema: Any) -> InstanceTexts:
    texts = InstanceTexts(["null"])
    texts.add(schema)
    return texts


def test_the_example_of_the_docstring() -> None:
    size = {"enum": ["S", "XL"]}
    schema = {"type": "object", "properties": {"size": size}, "required": ["size"]}
    texts = texts_of(schema)
    assert texts.values >= {"null", '"S"', '"XL"', '{"size":"S"}'}
    assert texts.members == {'"size":"S"'}
    assert texts.required == {',"size":"S"'}
    assert texts.tails >= {'L"', 'XL"', 'ize":', '":"S"'}


def test_a_member_that_is_not_required_only_follows() -> None:
    texts = texts_of({"properties": {"a": {"type": "integer"}}})
    assert texts.required == set()
    assert ',"a":0' in texts.following


@pytest.mark.parametrize(
    ("bound", "ends"),
    [
        ({"minimum": 199}, {"99", "00", "98"}),
        ({"exclusiveMaximum": 2.75}, {".75", "75", "5"}),
        ({"maximum": True}, set()),
        ({"minimum": "199"}, set()),
    ],
)
def test_bounds_give_the_digits_that_complete_a_number(
    bound: dict[str, Any], ends: set[str]
) -> None:
    own = texts_of({"type": "number", **bound}).numbers
    assert own - texts_of({"type": "number"}).numbers >= ends - texts_of({}).numbers
    assert bool(ends) == (own != texts_of({}).numbers)


def test_the_longest_tail_is_that_of_the_pattern_that_requires_most() -> None:
    schema = {"anyOf": [{"pattern": "^a+xyz$"}, {"pattern": "^b+y$"}], "type": "string"}
    assert texts_of(schema).longest_tail.endswith('xyz"')


def test_a_long_constant_proposes_its_end_only_so_far() -> None:
    texts = texts_of({"const": "x" * 500})
    assert len([tail for tail in texts.tails if tail.startswith("x")]) == MOST_SUFFIXES - 1


@pytest.mark.parametrize("schema", [{"enum": 3}, {"minLength": "no"}, 7, {"required": 1}, True])
def test_what_cannot_be_read_of_a_schema_is_left_out(schema: Any) -> None:
    assert texts_of(schema).values >= {"null"}


def test_an_unreadable_schema_spoils_no_other() -> None:
    texts = InstanceTexts([])
    assert texts.add({"type": "string", "minLength": "no"}) is None
    assert texts.add({"const": 5}) == "5"
    assert "5" in texts.values
