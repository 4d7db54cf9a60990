"""Text is passed on as it is, whatever it looks like."""

import pytest

from mlx_server.events import Event, TextDelta
from mlx_server.parsers.parse_context import ParseContext, TextParser

LOOKS = "<think>a</think><tool_call>{}</tool_call> \n"


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("size", [1, 5, len(LOOKS)])
def test_every_piece_comes_at_once(size: int, cut: bool) -> None:
    parser = TextParser(ParseContext(index=3))
    pieces = [LOOKS[at : at + size] for at in range(0, len(LOOKS), size)]
    found = [event for piece in pieces for event in parser.feed(7, piece)]
    assert found == [TextDelta(3, piece) for piece in pieces]
    assert parser.finish(cut=cut) == []


def test_no_text_is_no_event() -> None:
    parser = TextParser(ParseContext())
    none: list[Event] = []
    assert parser.feed(0, "") == none
    assert not parser.is_unterminated
    assert not parser.awaits_answer
    assert list(parser.messages()) == []
