"""Arguments as elements of their own names, as MiniMax M3 writes them."""

from typing import Any

import pytest

from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.elements import MINIMAX_M3

SIGN = "]<]minimax[>["
TOOLS = [
    Tool("now"),
    Tool("f", parameters={"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}),
]


def signed(text: str) -> str:
    """A block of calls; `~` is the sign."""
    return f"{text}~</tool_call>".replace("~", SIGN)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", {}),
        ("~<text> a <b>c</b>\n~</text>", {"text": " a <b>c</b>\n"}),
        ("~<n>7~</n>\n~<text>7~</text>", {"n": 7, "text": "7"}),
        ("~<tags>~<item>a~</item>~<item>b~</item>~</tags>", {"tags": ["a", "b"]}),
        ("~<tags>~<item>a~</item>~</tags>", {"tags": ["a"]}),
        ("~<o>~<a>x~</a>~<b>~<c>y~</c>~</b>~</o>", {"o": {"a": "x", "b": {"c": "y"}}}),
        ("~<o>~<a>x~</a>~<a>y~</a>~</o>", {"o": {"a": ["x", "y"]}}),
        ("~<tags>a~</tags>~<tags>b~</tags>", {"tags": ["a", "b"]}),
        ('~<argument name="text">a~</argument>', {"text": "a"}),
    ],
)
def test_elements_are_values_lists_and_objects(inside: str, arguments: dict[str, Any]) -> None:
    (call,) = parse_calls(MINIMAX_M3, signed(f'~<invoke name="f">{inside}~</invoke>'), TOOLS)
    assert call["arguments"] == arguments


@pytest.mark.parametrize(
    "inside",
    [
        '~<invoke name="launch">~</invoke>',
        '~<invoke name="f"',
        '~<invoke name="f">text~</invoke>',
        '~<invoke name="f">~<text>a~</invoke>',
        '~<invoke name="f">~</text>~</invoke>',
        '~<invoke name="f">~<n\n>7~</n>~</invoke>',
        '~<invoke name="f">~<o>' + "~<a>" * 100 + "~</invoke>",
    ],
)
def test_what_is_no_call(inside: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_calls(MINIMAX_M3, signed(inside), TOOLS)
