"""A call that is written again and again."""

from dataclasses import replace

import pytest

from mlx_server.events import Repaired, ToolCallStarted
from mlx_server.parsers.markup_parser import MarkupLayout, MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.repair import RepairPolicy
from mlx_server.tool_parsers import keyed_calls
from mlx_server.tool_parsers.call_format import finished_calls
from tests.tool_parsers.written_tools import TOOLS


def block(value: str) -> str:
    argument = f"<arg_key>path</arg_key>\n<arg_value>{value}</arg_value>\n"
    return f"<tool_call>write\n{argument}</tool_call>\n"


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
