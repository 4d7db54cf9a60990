"""Kimi K3's calls: openings with attributes, and arguments with their types."""

from typing import Any

import pytest

from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import UncallableTool, parse_calls
from mlx_server.tool_parsers.elements import KIMI_K3

TOOLS = [
    Tool("now"),
    Tool("f", parameters={"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}),
]
END = "<|close|>tools<|sep|>"


def called(attributes: str, inside: str) -> str:
    return f"<|open|>call {attributes}<|sep|>{inside}<|close|>call<|sep|>"


def argument(attributes: str, value: str) -> str:
    return f"<|open|>argument {attributes}<|sep|>{value}<|close|>argument<|sep|>"


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", {}),
        (argument('key="text" type="string"', " <a>\n"), {"text": " <a>\n"}),
        (argument('type="number" key="n"', "7"), {"n": 7}),
        (argument('key="text"', "7"), {"text": "7"}),
        (argument('key="q&amp;a &quot;x&quot;" type="null"', "null"), {'q&a "x"': None}),
        (argument("key = 'text'", "a"), {"text": "a"}),
        ('<|open|>json<|sep|>{"n": 7}<|close|>json<|sep|>', {"n": 7}),
        ('{"n": 7}', {"n": 7}),
    ],
)
def test_arguments_have_their_types(inside: str, arguments: dict[str, Any]) -> None:
    (call,) = parse_calls(KIMI_K3, called('tool="f" index="1"', inside) + END, TOOLS)
    assert (call["name"], call["arguments"]) == ("f", arguments)


def test_calls_follow_one_another() -> None:
    both = called('tool="now" index="1"', "") + "\n" + called("index=2 tool='f'", "")
    assert [call["name"] for call in parse_calls(KIMI_K3, both + END, TOOLS)] == ["now", "f"]


@pytest.mark.parametrize(
    "text",
    [
        called('tool="launch"', ""),
        called('index="1"', ""),
        called('tool="f"', argument('type="string"', "a")),
        called('tool="f"', "text"),
        called('tool="f"', '<|open|>argument key="text"<|sep|>a'),
        called('tool="f" <|open|>', ""),
    ],
)
def test_what_is_no_call(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_calls(KIMI_K3, text + END, TOOLS)


def test_a_name_that_would_end_its_opening_can_not_be_written() -> None:
    (block, *_) = KIMI_K3.blocks
    with pytest.raises(UncallableTool):
        block.call(Lark(), Tool("a<|sep|>b", "", {}))
