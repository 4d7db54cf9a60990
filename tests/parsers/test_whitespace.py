"""White space next to a delimiter belongs to it, all other to the text, however it comes."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.parsers.text_pieces import WhitespaceTrimmer
from tests.slowness import slowness

texts = st.text(alphabet="ab \n\t", max_size=12)


def passed(space: WhitespaceTrimmer, text: str, size: int) -> str:
    return "".join(space.feed(text[at : at + size]) for at in range(0, len(text), size))


@given(texts, st.integers(1, 5), st.booleans())
def test_up_to_a_delimiter_and_up_to_the_end(text: str, size: int, leading: bool) -> None:
    trimmed = text.lstrip() if leading else text
    space = WhitespaceTrimmer(trims=True, leading=leading)
    assert passed(space, text, size) == trimmed.rstrip()
    assert space.at_delimiter() == trimmed[len(trimmed.rstrip()) :]
    assert space.at_delimiter() == ""
    space = WhitespaceTrimmer(trims=True, leading=leading)
    assert passed(space, text, size) + space.flush() == trimmed


@pytest.mark.parametrize("size", [1, 4, 1 << 20])
def test_much_space_takes_time_by_its_length(size: int) -> None:
    space = WhitespaceTrimmer(trims=True)
    began = time.thread_time()
    assert passed(space, " " * 400_000 + "x", size) == " " * 400_000 + "x"
    assert time.thread_time() - began < 2 * slowness()
