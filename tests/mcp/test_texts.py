"""A text is cut by bytes, and no character is cut in two."""

import pytest

from mlx_server.mcp.texts import cut


@pytest.mark.parametrize(
    ("text", "longest", "expected"),
    [
        ("", 0, ""),
        ("abc", 3, "abc"),
        ("abc", 2, "ab\n[cut here; it has 3 bytes]"),
        ("é", 1, "\n[cut here; it has 2 bytes]"),
        ("a🙂", 4, "a\n[cut here; it has 5 bytes]"),
        ("a🙂", 5, "a🙂"),
        ("a\ud800b", 1, "a\n[cut here; it has 3 bytes]"),
        ("abc", 0, "\n[cut here; it has 3 bytes]"),
    ],
)
def test_what_is_left(text: str, longest: int, expected: str) -> None:
    assert cut(text, longest) == expected
