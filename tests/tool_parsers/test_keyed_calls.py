"""Calls whose arguments are pairs of a key and a value: with a section, with types, or neither."""

from typing import Any

import pytest

from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import UncallableTool, parse_calls
from mlx_server.tool_parsers.keyed_calls import KeyedCallFormat

TOOLS = [
    Tool("now"),
    Tool("f", parameters={"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}),
]
ALONE = KeyedCallFormat(
    before_name="<c>",
    key_opens="<k>",
    key_closes="</k>",
    type_opens="<t>",
    type_closes="</t>",
    value_opens="<v>",
    value_closes="</v>",
    closes_call="</c>",
).call_format()
SECTION = KeyedCallFormat(
    opens="<s>",
    before_name="<c>",
    after_name="<n>",
    key_opens="<k>",
    key_closes="<v>",
    value_closes="</v>",
    closes_call="</c>",
    closes="</s>",
).call_format()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("f</c>", {}),
        ("\nf\n<k>text</k>\n<v> a\n</v>\n</c>", {"text": " a\n"}),
        ("f<k>n</k><t>integer</t><v>7</v><k>text</k><v>7</v></c>", {"n": 7, "text": "7"}),
        ("f<k>text</k><v>a </v> b</v></c>", {"text": "a </v> b"}),
        ('f<k>o</k><v>{"a": "</v></c>"}</v></c>', {"o": {"a": "</v></c>"}}),
        ('{"name": "f", "arguments": {"n": 7}}</c>', {"n": 7}),
    ],
)
def test_a_call_that_stands_alone(text: str, arguments: dict[str, Any]) -> None:
    (call,) = parse_calls(ALONE, text, TOOLS)
    assert (call["name"], call["arguments"]) == ("f", arguments)


def test_calls_of_a_section_whose_values_begin_after_their_keys() -> None:
    text = "\n<c>now<n></c>\n<c>f<n><k>text<v>\n a</v><k>n<v>7</v></c></s>"
    found = [(call["name"], call["arguments"]) for call in parse_calls(SECTION, text, TOOLS)]
    assert found == [("now", {}), ("f", {"text": "\n a", "n": 7})]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "launch</c>",
        "f and so on</c>",
        "f<k>text",
        "f<k>text</k>a</c>",
        "f<k>text</k><v>a",
        "f<k>n</k><v>7</v>text</c>",
    ],
)
def test_what_is_no_call(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_calls(ALONE, text, TOOLS)


@pytest.mark.parametrize(
    "tool",
    [
        Tool(" f", "", {}),
        Tool("a<b", "", {}),
        Tool("f", "", {"properties": {"a</k>": {}}, "required": ["a</k>"]}),
    ],
)
def test_a_name_or_key_that_its_delimiters_would_cut_is_refused(tool: Tool) -> None:
    with pytest.raises(UncallableTool):
        ALONE.blocks[0].call(Lark(), tool)
