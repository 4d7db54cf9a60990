"""References, and the parts of a schema."""

from typing import Any

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.view import (
    Part,
    View,
    pointer,
    reference,
    remote_reference,
    shorten,
)


def target(schema: dict[str, Any], ref: str) -> Any:
    found = View(schema).target(Part((), {"$ref": ref}))
    return found.schema if found else None


@pytest.mark.parametrize(
    ("ref", "found"),
    [
        ("#/$defs/a", {"const": 1}),
        ("#/$defs/b~1c", {"const": 2}),
        ("#/$defs/b%2Fc", None),
        ("#name", {"$anchor": "name"}),
        ("#old", {"id": "#old"}),
        ("#/allOf/1", False),
    ],
)
def test_a_reference_leads_to_its_target(ref: str, found: Any) -> None:
    definitions = {"a": {"const": 1}, "b/c": {"const": 2}}
    schema = {
        "$defs": {**definitions, "d": {"$anchor": "name"}, "e": {"id": "#old"}},
        "allOf": [True, False],
    }
    if found is None:
        with pytest.raises(InvalidGrammar, match="which is not there"):
            target(schema, ref)
    else:
        assert target(schema, ref) == found


@pytest.mark.parametrize(
    ("ref", "why"),
    [
        (7, "must be a string"),
        ("other.json#/a", "outside the schema"),
        ("#nowhere", r"no \$anchor of that name"),
        ("#/$defs", "which is not there"),
        ("#/title", "which is not a schema"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(ref: Any, why: str) -> None:
    with pytest.raises(InvalidGrammar, match=why):
        target({"title": "t"}, ref)


def test_an_id_between_root_and_target_is_refused() -> None:
    schema = {"$defs": {"a": {"$id": "http://x/", "$defs": {"b": {}}}}}
    with pytest.raises(InvalidGrammar, match="changes where references in it lead"):
        target(schema, "#/$defs/a/$defs/b")


def test_a_schema_that_refers_to_itself_is_walked_once() -> None:
    schema = {"properties": {"next": {"$ref": "#"}}, "$defs": {"unused": {}}}
    assert [part.path for part in View(schema).reached()] == [(), ("properties", "next")]


@pytest.mark.parametrize(
    ("schema", "remote"),
    [
        ({"$ref": "#/a"}, None),
        ({"properties": {"a": {"anyOf": [{}, {"$ref": "http://x/y"}]}}}, "http://x/y"),
        ({"unknown": [{"$dynamicRef": "other.json"}]}, "other.json"),
        ({"$recursiveRef": "#"}, None),
        ({"$ref": 3}, None),
    ],
)
def test_a_reference_out_of_the_schema_is_found_anywhere(
    schema: dict[str, Any], remote: str | None
) -> None:
    assert remote_reference(schema) == remote


def test_a_path_is_written_as_a_pointer_and_as_a_reference() -> None:
    path = ("properties", "a/b~c é")
    assert pointer(path) == "#/properties/a~1b~0c é"
    assert reference(path) == "#/properties/a~1b~0c%20%C3%A9"


def test_a_long_value_is_shortened() -> None:
    assert shorten("x" * 100) == '"' + "x" * 76 + "..."
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert shorten(nested) in ("this list", "[" * 77 + "...")
