"""Values in Gemma's spelling follow their schema."""

from typing import Any

import pytest

from tests.tool_parsers.block_grammars import allowed

pytestmark = pytest.mark.tables


@pytest.mark.parametrize(
    ("parameters", "text", "right"),
    [
        ({"b": {"type": "null"}, "a": {"type": "boolean"}}, "a:true,b:null", True),
        ({"b": {"type": "null"}, "a": {"type": "boolean"}}, "b:null,a:true", False),
        ({"x y": {"type": "string"}}, 'x y:<|"|>{a:b}<|"|>', True),
        ({"x:": {"type": "string"}}, '<|"|>x:<|"|>:<|"|>a<|"|>', True),
        ({"x": {"type": "string"}}, "x:a", False),
        ({"x": {"enum": ["a"]}}, 'x:<|"|>b<|"|>', False),
        ({"x": {"type": "object"}}, 'x:{a:[1,{b:<|"|>c<|"|>}]}', True),
        ({"x": {"type": "number"}}, "x:1e-05", True),
    ],
)
def test_gemma_follows_a_schema(parameters: dict[str, Any], text: str, right: bool) -> None:
    assert allowed("gemma4", parameters, f"call:f{{{text}}}<tool_call|>") == [right]
