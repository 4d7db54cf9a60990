"""A server's text can't act on the terminal that shows it."""

import io

import pytest
from rich.console import Console

from mlx_server.cli.terminal import printable


def shown(text: str) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor").print(printable(text))
    return out.getvalue().removesuffix("\n")


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "[bold red]org/model[/]",
        "[link=http://a]x[/link]",
        "[/unopened]",
        ":smile: 12 'a' http://a/b",
        "Salü 世界 🙂",
        "",
    ],
)
def test_text_is_shown_as_it_is(text: str) -> None:
    assert shown(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred", " [31mred"),
        ("a\nb\tc\r", "a b c "),
        ("a\x9b2Jb\x07\x7f", "a 2Jb  "),
        ("\u202eevil\u2028x", " evil x"),
    ],
)
def test_control_characters_become_spaces(text: str, expected: str) -> None:
    assert printable(text).plain == expected
    assert "\x1b" not in shown(text)
