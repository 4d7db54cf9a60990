"""The families as a table, for `mlx-server models --families` and families/README.md."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mlx_server.families import FAMILIES
from mlx_server.families.base import ModelFamily
from mlx_server.tool_parsers.call_format import CallFormat

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("Family", "Model types", "Template shows", "Reasoning", "Tool calls")

PIPE_WIDTH = 1_000
"""The width of the table's lines in a pipe, where the program that reads them needs whole lines."""

Row = tuple[str, list[str], list[str], list[str], list[str]]


def rows(families: Iterable[ModelFamily] = FAMILIES) -> list[Row]:
    return [_row(family) for family in families]


def markdown() -> str:
    """The families and their checkpoints in Markdown, which families/README.md contains."""
    cells = ([_code([name]), _code(types), _code(shown)] for name, types, shown, *_ in rows())
    lines = [COLUMNS[:3], ["---"] * 3, *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def show(console: "Console") -> None:
    from rich.table import Table  # imported here, since the server imports this module for `rows`
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for name, *lists in rows():
        table.add_row(Text(name), *(Text(", ".join(items)) for items in lists))
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)


def _row(family: ModelFamily) -> Row:
    layout = family.layout_with()
    reasoning = [_delimited(opening, closing) for opening, closing in layout.reasoning]
    calls = [shape for notation in layout.call_formats for shape in _shapes(notation)]
    given = [[shape] if shape else [] for shape in family.shapes]
    return (
        family.name,
        list(family.model_types),
        list(family.template_markers),
        reasoning or given[0],
        calls or given[1],
    )


def _shapes(call_format: CallFormat) -> list[str]:
    closing = call_format.closes[0] if call_format.closes else ""
    return [_delimited(opening, closing) for opening in (*call_format.opens, *call_format.begins)]


def _delimited(opening: str, closing: str) -> str:
    shown = (delimiter.strip().replace("\n", " ⏎ ") for delimiter in (opening, closing))
    return "…".join(shown)


def _code(items: Sequence[str]) -> str:
    """The items as code. A bar is escaped, since it would end the cell even within code."""
    return ", ".join(_quoted(item).replace("|", "\\|") for item in items)


def _quoted(item: str) -> str:
    """The item as code, even if it contains backticks itself."""
    return f"````` {item} `````" if "`" in item else f"`{item}`"
