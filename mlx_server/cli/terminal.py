"""The standard streams of a command, which may be closed, full or a terminal, and its tables."""

import io
import os
import re
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a terminal would obey; tab and line feed are left in."""

USERINFO = re.compile(r"(?<=//)[^/\s]*@")
"""The user and the password of a URL."""


def prepare_streams() -> None:
    """Opens streams that are closed, since a file that is opened later would get their numbers."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def discard_output() -> None:
    """Drops what could not be written, so that the end of the process does not try again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def safe(text: str) -> str:
    """The text without control characters, and without the passwords of its URLs."""
    return USERINFO.sub("", CONTROL.sub("", text))


def words_of(error: OSError) -> str:
    place = f"{os.fsdecode(error.filename)!r}" if error.filename else "The output or a file"
    return (
        f"{place} can't be read or written: {error.strerror or error}. Check the path, its "
        "permissions and the free space on its disk."
    )


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
        table.add_column(printable(column), no_wrap=column not in wrapped, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)
