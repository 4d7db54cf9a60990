"""A call that is written again and again."""

from mlx_server.events import ToolCallStarted
from mlx_server.parsers.markup_parser import MarkupLayout, MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.tool_parsers import keyed_calls
from mlx_server.tool_parsers.call_format import finished_calls
from tests.tool_parsers.written_tools import TOOLS


def block(value: str) -> str:
    argument = f"<arg_key>path</arg_key>\n<arg_value>{value}</arg_value>\n"
    return f"<tool_call>write\n{argument}</tool_call>\n"


def test_the_same_call_again_is_made_again() -> None:
    for holds_calls in (False, True):
        context = ParseContext(tools=TOOLS, holds_calls=holds_calls)
        parser = MarkupParser(MarkupLayout(call_formats=(keyed_calls.GLM,)), context)
        events = [event for letter in block("a") * 3 for event in parser.feed(-1, letter)]
        events += parser.finish(cut=False)
        assert [call["arguments"]["path"] for call in finished_calls(events)] == ["a"] * 3
        assert [event.call for event in events if isinstance(event, ToolCallStarted)] == [0, 1, 2]
