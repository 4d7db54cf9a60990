"""DeepSeek V3, R1 and V3.1."""

from typing import Any

import pytest

from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.formats import DEEPSEEK

TOOLS = [Tool("add"), Tool("now"), Tool("function")]


def v3(name: str, arguments: str) -> str:
    return v31("function", f"{name}\n```json\n{arguments}\n```")


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


@pytest.mark.parametrize("write", [v3, v31])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("{}", {}),
        ('{"a": 1, "b": [null]}', {"a": 1, "b": [None]}),
        ('{"a": "```<｜tool▁call▁end｜>"}', {"a": "```<｜tool▁call▁end｜>"}),
        ('{"a": 1,}', {"a": 1}),
        ("{'a': 1}", {"a": 1}),
    ],
)
def test_two_calls(write: Any, written: str, read: dict[str, Any]) -> None:
    text = write("now", "{}") + "\n" + write("add", written) + "<｜tool▁calls▁end｜>"
    found = parse_calls(DEEPSEEK, text, TOOLS)
    assert [call["arguments"] for call in found if call["name"] == "add"] == [read]


def test_a_tool_may_be_called_function() -> None:
    (call,) = parse_calls(DEEPSEEK, v31("function", '{"a": 1}'), TOOLS)
    assert (call["name"], call["arguments"]) == ("function", {"a": 1})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        v31("launch", "{}"),
        v31("add", '{"a": "1'),
        v3("add", '{"a": 1'),
        v31("add", "[1]"),
        "function<｜tool▁sep｜>now\n```json\n{}\n```",
    ],
)
def test_no_call(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_calls(DEEPSEEK, text, TOOLS)
