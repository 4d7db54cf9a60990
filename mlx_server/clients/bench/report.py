"""Prints the results of a bench, one line each."""

import math
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.table import Table

from mlx_server.clients.bench.result import Result

COLUMNS = (
    "clients",
    "prompt tokens",
    "first token, ms",
    "p95",
    "next token, ms",
    "p95",
    "tokens/s",
    "failed",
)
"""The column titles. A time is the median over all requests, except in a `p95` column, which has
the 95th percentile of the column to its left."""


def report(results: Iterable[Result], console: Console) -> bool:
    """Prints each result as soon as it is measured: a table in a terminal, plain lines in a pipe.

    Returns False if any request failed.
    """
    show = _table if console.is_terminal else _lines
    errors = Counter(error for result in show(results, console) for error in result.errors)
    for error, count in errors.most_common():
        printable = "".join(filter(str.isprintable, error))  # a server may send anything
        console.out(f"{count} failed: {printable}", highlight=False)
    return not errors


def _table(results: Iterable[Result], console: Console) -> list[Result]:
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="right")
    done: list[Result] = []
    with Live(table, console=console):
        for result in results:
            table.add_row(*_row(result))
            done.append(result)
    return done


def _lines(results: Iterable[Result], console: Console) -> list[Result]:
    def line(cells: Iterable[str]) -> str:
        wide = zip(cells, COLUMNS, strict=True)
        return "  ".join(cell.rjust(max(8, len(name))) for cell, name in wide)

    done: list[Result] = []
    for result in results:
        if not done:
            console.out(line(COLUMNS), highlight=False)
        console.out(line(_row(result)), highlight=False)
        done.append(result)
    return done


def _row(result: Result) -> list[str]:
    first, gap = result.first_token, result.gap
    times = [first.median, first.p95, gap.median, gap.p95]
    return [
        str(result.workload.clients),
        "?" if result.prompt_tokens is None else str(result.prompt_tokens),
        *map(milliseconds, times),
        f"{result.tokens_per_second:.1f}",
        f"{len(result.errors)}/{result.workload.requests}",
    ]


def milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.1f}"
