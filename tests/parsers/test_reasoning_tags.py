"""Which delimiters are tags like any other."""

import pytest

from mlx_server.parsers.parse_context import is_tag


@pytest.mark.parametrize(
    ("opening", "expected"),
    [
        ("<think>", True),
        (" <think>\n", True),
        ("<seed:think>", True),
        ("<a><b-c>", True),
        ("<überlegt>", True),
        ("", False),
        ("<>", False),
        ("think", False),
        ("<|channel>thought", False),
        ("[THINK]", False),
        ("<think> <b>", False),
        ("<a b>", False),
        ("◁think▷", False),
    ],
)
def test_a_tag_is_a_name_in_pointed_brackets(opening: str, expected: bool) -> None:
    assert is_tag(opening) is expected
