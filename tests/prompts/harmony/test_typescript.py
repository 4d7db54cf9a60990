"""What gpt-oss reads of a tool's parameters."""

from typing import Any

import pytest

from mlx_server.prompts.harmony.tools_text import for_typescript

PLACE: dict[str, Any] = {"type": "string", "description": "a place"}


@pytest.mark.parametrize(
    ("reference", "rest"),
    [
        ("#/$defs/place", {"$defs": {"place": PLACE}}),
        ("#place", {"$defs": {"place": {"$anchor": "place", **PLACE}}}),
        ("#/examples/1", {"examples": [{}, PLACE]}),
    ],
    ids=["a definition", "an anchor", "a place in a list"],
)
def test_a_reference_is_replaced_by_what_it_means(reference: str, rest: dict[str, Any]) -> None:
    found = for_typescript({"properties": {"from": {"$ref": reference}}, **rest})
    assert found
    assert found["properties"]["from"].items() >= PLACE.items()


def test_a_schema_that_refers_to_itself_ends() -> None:
    found = for_typescript({"properties": {"a": {"$ref": "#/properties/a"}, "b": PLACE}})
    assert found
    assert found["properties"] == {"a": {}, "b": PLACE}
