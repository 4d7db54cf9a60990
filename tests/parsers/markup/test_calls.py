"""Calls within an answer: where they may stand, and when they are reported."""

from dataclasses import replace

from mlx_server.events import TextDelta, ToolCallDelta
from mlx_server.parsers.markup_parser import MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from tests.parsers.markup.played import (
    BARE,
    CLOSE,
    LAYOUT,
    NOW,
    OPEN,
    TOOLS,
    call,
    continued,
    reading,
)


def test_a_call_may_end_reasoning() -> None:
    layout = replace(LAYOUT, calls_end_reasoning=True)
    for size in range(1, 12):
        found = reading(f"<think>a {OPEN}{NOW}{CLOSE}b</think>c", size, layout=layout)
        assert found == {"reasoning": "a", "calls": [{}], "text": "bc"}


def test_a_call_without_delimiters_stands_anywhere_if_its_tool_is_known() -> None:
    for size in range(1, 12):
        assert reading(NOW, size, layout=BARE) == {"calls": [{}]}
        assert reading(f"<think>a</think>\n{NOW}", size, layout=BARE)["calls"] == [{}]
        assert reading(f"Like {NOW}", size, layout=BARE) == {"text": "Like", "calls": [{}]}
        unknown = NOW.replace("now", "then")
        assert reading(f"Like {unknown}", size, layout=BARE) == {"text": f"Like {unknown}"}
        assert reading('{"a": 1}', size, layout=BARE) == {"text": '{"a": 1}'}


def test_text_and_arguments_come_as_they_are_written() -> None:
    parser = MarkupParser(LAYOUT, ParseContext(tools=TOOLS))
    events = [list(parser.feed(-1, c)) for c in f"ab{OPEN}{call('xy')}{CLOSE}"]
    assert events[:2] == [[TextDelta(0, "a")], [TextDelta(0, "b")]]
    deltas = [e.arguments for step in events for e in step if isinstance(e, ToolCallDelta)]
    assert deltas == ['{"text": "', "x", "y", '"', "}"]


def test_what_would_be_a_call_at_the_beginning_is_text_within_one() -> None:
    assert continued(NOW, layout=BARE) == [{"text": NOW}]
    assert reading(NOW, layout=BARE) == {"calls": [{}]}
