"""The families as a table, for README.md and for `mlx-server models --families`."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlx_server.families import FAMILIES
from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup import MarkupLayout
from mlx_server.tool_parsers.call_format import CallFormat

COLUMNS = ("Family", "Model types", "Template shows", "Reasoning", "Tool calls")

PIPE_WIDTH = 1_000
"""Line width if the output is not a terminal, so that no line is cut for a program."""

Row = tuple[str, list[str], list[str], list[str], list[str]]


def rows(families: Iterable[ModelFamily] = FAMILIES) -> list[Row]:
    return [_row(family) for family in families]


def markdown() -> str:
    """The table in Markdown, as README.md has it."""
    cells = ([_code([name]), *map(_code, lists)] for name, *lists in rows())
    lines = [COLUMNS, ["---"] * len(COLUMNS), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def show(console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for name, *lists in rows():
        table.add_row(Text(name), *(Text(", ".join(items)) for items in lists))
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)


def _row(family: ModelFamily) -> Row:
    layout = MarkupLayout(reasoning=()) if family.overrides else family.layout_with()
    reasoning = [_delimited(opening, closing) for opening, closing in layout.reasoning]
    calls = [shape for call_format in layout.call_formats for shape in _shapes(call_format)]
    shown = [[shape] if shape else [] for shape in family.shapes]
    return (
        family.name,
        list(family.model_types),
        list(family.template_markers),
        reasoning or shown[0],
        calls or shown[1],
    )


def _shapes(call_format: CallFormat) -> list[str]:
    closing = call_format.closes[0] if call_format.closes else ""
    return [_delimited(opening, closing) for opening in (*call_format.opens, *call_format.begins)]


def _delimited(opening: str, closing: str) -> str:
    return f"{opening.strip()}…{closing.strip()}"


def _code(items: Sequence[str]) -> str:
    """The items as code. A bar is escaped because it would end the cell even within code."""
    return ", ".join(f"`{item}`".replace("|", "\\|") for item in items)
