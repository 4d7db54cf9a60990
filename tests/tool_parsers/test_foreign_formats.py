"""Calls in another family's format are made if they name a known tool; else they are text."""

from typing import Any

import pytest

import mlx_server
from mlx_server.events import Repaired, TextDelta
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import finished_calls
from mlx_server.tool_parsers.formats import FOREIGN_FORMATS

TOOLS = [Tool("look_up", parameters={"properties": {"q": {"type": "string"}}})]
FAMILY = "gigachat"
"""A family whose own calls have another format."""

OBJECT = '{"name": "look_up", "arguments": {"q": "a"}}'
CALLS = {
    "<tool_call>": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "<function=": "<function=look_up>\n<parameter=q>\na\n</parameter>\n</function>",
    "[TOOL_CALLS]": f"[TOOL_CALLS][{OBJECT}]",
    "functools[": f"functools[{OBJECT}]",
}
"""A call in each format, by the format's opening delimiter."""

OPENINGS = [opening for each in FOREIGN_FORMATS for opening in each.opens]


def read(text: str) -> tuple[str, list[Any], list[str]]:
    """The text, the calls with their arguments, and the repairs."""
    events = mlx_server.read(text, FAMILY, TOOLS)
    shown = "".join(event.separated for event in events if isinstance(event, TextDelta))
    calls = [(call["name"], call["arguments"]) for call in finished_calls(events)]
    return shown, calls, [event.what for event in events if isinstance(event, Repaired)]


def test_every_format_is_tried_here_and_opens_with_a_delimiter_of_its_own() -> None:
    assert sorted(OPENINGS) == sorted(CALLS)
    assert all(each.opens for each in FOREIGN_FORMATS)


@pytest.mark.parametrize("opening", CALLS)
def test_a_call_is_made_and_reported_as_one_of_another_format(opening: str) -> None:
    shown, calls, repairs = read(CALLS[opening])
    assert (shown, calls) == ("", [("look_up", {"q": "a"})])
    assert "format" in repairs


@pytest.mark.parametrize("opening", CALLS)
def test_a_call_of_an_unknown_tool_is_text(opening: str) -> None:
    text = CALLS[opening].replace("look_up", "format_disk")
    assert read(text) == (text, [], [])


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_text_that_mentions_a_delimiter_goes_on_at_once(opening: str) -> None:
    reader = mlx_server.OutputReader(FAMILY, TOOLS)
    pieces = ("Models write ", opening, " for calls, as documents say that explain them.\n\nThus")
    fed = [event for piece in pieces for event in reader.feed(piece)]
    shown = "".join(event.text for event in fed if isinstance(event, TextDelta))
    assert opening in shown, "before the answer ends"
