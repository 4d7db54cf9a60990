"""A parameter that a format can't write is left out, or its tool is refused."""

import pytest

from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import UncallableTool
from tests.tool_parsers.block_grammars import grammar_of, opening
from tests.walks import accepts

pytestmark = pytest.mark.tables


@pytest.mark.parametrize(
    ("family", "tool"),
    [
        ("qwen3_coder", Tool("a>b", "", {})),
        ("qwen3_coder", Tool("f", "", {"properties": {"a\nb": {}}, "required": ["a\nb"]})),
        ("minimax_m2", Tool('a"b', "", {})),
        ("glm4_5", Tool("a<b", "", {})),
        ("gemma4", Tool("a b", "", {})),
        ("kimi_k3", Tool("a<|sep|>b", "", {})),
        ("lfm2", Tool("f", "", {"properties": {"a-b": {}}, "required": ["a-b"]})),
    ],
)
def test_what_has_no_way_to_be_written_is_refused(family: str, tool: Tool) -> None:
    notation, _ = opening(family)
    with pytest.raises(UncallableTool, match="This model has no way to write"):
        notation.blocks[0].call(Lark(), tool)


def test_a_parameter_that_can_be_left_out_is_if_it_can_not_be_written() -> None:
    tool = Tool("f", "", {"properties": {"a-b": {}, "c": {"type": "null"}}})
    notation, opens = opening("lfm2")
    grammar = grammar_of("lfm2", notation, opens, (tool,))
    for text, right in (("f(c=None)", True), ("f()", True), ("f(a-b=1)", False)):
        assert accepts("lfm2", grammar, f"{opens}[{text}]<|tool_call_end|>") is right
