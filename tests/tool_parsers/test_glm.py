"""GLM-4.5 and later, and the GLM-4 before."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_server.events import Repaired, ToolCallStarted
from mlx_server.parsers.markup_parser import MarkupLayout, MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.repair import RepairPolicy
from mlx_server.tool_parsers import keyed_calls
from mlx_server.tool_parsers.call_format import finished_calls, parse_calls
from tests.tool_parsers.written_tools import TOOLS


def argument(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


def block(value: str) -> str:
    return f"<tool_call>write\n{argument('path', value)}</tool_call>\n"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("write</tool_call>", {}),
        ("write", {}),
        ("\n write \n" + argument("count", "5") + "</tool_call>", {"count": 5}),
        ("write" + argument("path", "5"), {"path": "5"}),
        ("write" + argument("other", "[1]") + argument("count", " 5 "), {"other": [1], "count": 5}),
        ("write" + argument("path", "see </arg_value> or </tool_call>, see"),
         {"path": "see </arg_value> or </tool_call>, see"}),
        ("write" + argument("path", block("x")) + "</tool_call>", {"path": block("x")}),
        ("write<arg_key>path</arg_key><arg_value>x</tool_call>", {"path": "x"}),
        ("<tool_call>write<tool_call>\nwrite" + argument("path", "x"), {"path": "x"}),
    ],
)  # fmt: skip
def test_one_call(text: str, arguments: dict[str, Any]) -> None:
    (call,) = parse_calls(keyed_calls.GLM, text, TOOLS)
    assert (call["name"], call["arguments"]) == ("write", arguments)


@pytest.mark.parametrize(
    "text", ["", "nothing", "now<arg_key>", "now and then", "write<arg_key>path</arg_key>x"]
)
def test_no_call(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_calls(keyed_calls.GLM, text, TOOLS)


@pytest.mark.parametrize(
    ("written", "repeats", "made", "dropped"),
    [
        ("aaa", None, "aaa", 0),
        ("aaa", 1, "a", 2),
        ("aaaa", 3, "aaa", 1),
        ("aabab", 1, "abab", 1),
        ("aaaba", 2, "aaba", 1),
    ],
)
def test_the_same_call_again_is_made_as_often_as_is_allowed(
    written: str, repeats: int | None, made: str, dropped: int
) -> None:
    context = ParseContext(tools=TOOLS, repair=RepairPolicy(repeats=repeats))
    for holds_calls in (False, True):
        parser = MarkupParser(
            MarkupLayout(call_formats=(keyed_calls.GLM,)), replace(context, holds_calls=holds_calls)
        )
        text = "".join(map(block, written))
        events = [event for letter in text for event in parser.feed(-1, letter)]
        events += parser.finish(cut=False)
        calls = [call["arguments"]["path"] for call in finished_calls(events)]
        assert "".join(calls) == made
        numbers = [event.call for event in events if isinstance(event, ToolCallStarted)]
        assert numbers == list(range(len(made)))
        repairs = [event.what for event in events if isinstance(event, Repaired)]
        assert repairs == ["stutter"] * dropped
