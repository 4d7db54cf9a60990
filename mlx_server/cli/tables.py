"""Tables for a terminal or a pipe, with texts that are shown as they are."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 10_000
"""Width of tables in a pipe, in characters: wide enough that no line is cut."""


def printable(text: str) -> Text:
    """Rich text without markup or control characters."""
    return Text("".join(c if c.isprintable() else " " for c in text))


def print_line(text: str, console: Console) -> None:
    console.print(printable(text), soft_wrap=True)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    console: Console,
    wrapped: Sequence[str] = (),
) -> None:
    """wrapped: the columns whose texts may take several lines."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in wrapped, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)
