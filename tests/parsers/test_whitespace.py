"""White space next to a delimiter belongs to it, all other to the text, however it comes."""

import time

import pytest

from mlx_server.parsers.text_pieces import WhitespaceTrimmer
from tests.slowness import slowness


def passed(space: WhitespaceTrimmer, text: str, size: int) -> str:
    return "".join(space.feed(text[at : at + size]) for at in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 4, 1 << 20])
def test_much_space_takes_time_by_its_length(size: int) -> None:
    space = WhitespaceTrimmer(trims=True)
    began = time.thread_time()
    assert passed(space, " " * 400_000 + "x", size) == " " * 400_000 + "x"
    assert time.thread_time() - began < 2 * slowness()
