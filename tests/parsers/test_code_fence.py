"""Whether a text ends in a block of code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.parsers.text_pieces import CodeFence, open_fence


@pytest.mark.parametrize(
    ("text", "fence"),
    [
        ("```python\nx", "```"),
        ("a\n  ~~~~ x", "~~~~"),
        ("```\nx\n```", ""),
        ("````\nx\n```", "````"),
        ("```\n~~~", "```"),
        ("``` a ` b", ""),
        ("    ```", ""),
        ("a ```", ""),
    ],
)
def test_an_open_block(text: str, fence: str) -> None:
    assert open_fence(text) == fence


@given(st.lists(st.sampled_from(["```", "~~~~", "`", "\n", " ", "x", "a" * 90]), max_size=30))
def test_it_is_the_same_in_pieces(pieces: list[str]) -> None:
    fence = CodeFence()
    for piece in pieces:
        fence.feed(piece)
    assert fence.open == open_fence("".join(pieces))
