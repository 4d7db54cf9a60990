"""Calls whose tool's name is a line of its own."""

from typing import Any

import pytest

from mlx_server.parsers.markup_parser import MarkupLayout, MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.tool_parsers import named_calls
from mlx_server.tool_parsers.call_format import finished_calls
from tests.tool_parsers.written_tools import TOOLS


@pytest.mark.parametrize(
    ("text", "arguments"), [("now\n{}", {}), ('now\n{"a": "}"}\n', {"a": "}"})]
)
def test_old_glm4(text: str, arguments: dict[str, Any]) -> None:
    layout = MarkupLayout(call_formats=named_calls.glm4(TOOLS))
    parser = MarkupParser(layout, ParseContext(tools=TOOLS))
    (call,) = finished_calls([*parser.feed(-1, text), *parser.finish(cut=False)])
    assert call["arguments"] == arguments
