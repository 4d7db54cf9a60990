"""The calls that a call format finds in a text."""

from collections.abc import Sequence
from typing import Any

from mlx_server.events import TextDelta
from mlx_server.messages import Tool
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.markup_parser import MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.tool_parsers.call_format import CallFormat, finished_calls


def parse_calls(call_format: CallFormat, text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The calls in a text from after the opening delimiter; ValueError if it holds none."""
    context = ParseContext(tools=tuple(tools))
    parser = MarkupParser(MarkupLayout((), (call_format,)), context)
    opening = call_format.opens[0] if call_format.opens else call_format.begins[0]
    events = [*parser.feed(-1, opening + text), *parser.finish(cut=False)]
    calls = finished_calls(events)
    if not calls and (not text or any(isinstance(event, TextDelta) for event in events)):
        raise ValueError(f"no call in {text!r}")
    return calls
