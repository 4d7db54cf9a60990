"""Tools whose schemas are not quite JSON Schema: what can be read of them is held, and the rest is
reported."""

from typing import Any

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.formats import usable_tools
from mlx_server.messages import Tool
from tests.tables import cases

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
