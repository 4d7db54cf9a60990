"""A server's text can't act on the terminal that shows it."""

import io

from rich.console import Console

from mlx_server.cli.terminal import printable
from tests.tables import cases


def shown(text: str) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor").print(printable(text))
    return out.getvalue().removesuffix("\n")


@cases
def test_text_is_shown_as_it_is(text: str) -> None:
    assert shown(text) == text


@cases
def test_control_characters_become_spaces(text: str, expected: str) -> None:
    assert printable(text).plain == expected
    assert "\x1b" not in shown(text)
