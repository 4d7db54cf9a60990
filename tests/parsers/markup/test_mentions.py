"""Delimiters that a text mentions structure nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.parsers.markup_parser import MarkupLayout
from tests.parsers.markup.played import CLOSE, CONTROL, reading


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_closing_delimiter_within_a_line_is_text_unless_it_is_a_token(size: int) -> None:
    about = f"A call ends with {CLOSE} and so on."
    assert reading(about, size) == {"text": about}
    assert reading(about, size, control=CONTROL) == {"text": "A call ends with and so on."}


WORDS = st.lists(
    st.sampled_from(["The", "a", "tag", "<think>", "</think>", "<thinking>", "`<think>`", "ends,"]),
    max_size=8,
).map(" ".join)


@given(WORDS, st.integers(1, 7), st.sampled_from([{}, CONTROL]))
def test_a_text_may_be_about_tags(words: str, size: int, control: dict[int, str]) -> None:
    text = f"Look: {words}"
    found = reading(text, size, layout=MarkupLayout(), control=control)
    assert "reasoning" not in found
    if "</think>" not in text.partition("<think>")[0]:
        assert found["text"].split()[:2] == text.split()[:2]
        assert found["text"].count("<think>") == text.count("<think>")
