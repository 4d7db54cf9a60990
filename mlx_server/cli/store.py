"""`mlx-server store`: what is stored of responses and conversations."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.tables import print_line
from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import Settings
from mlx_server.limits import STORED_RESPONSES
from mlx_server.store import Retention, Stats, Store

app = command_app()


@app.command()
def store(
    config: ConfigFile = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="First remove what exceeds the limits.")
    ] = False,
) -> None:
    """Show how many responses and conversations are stored, and where.

    \b
    mlx-server store
    mlx-server store --prune
    MLX_SERVER_DATA=/srv/mlx mlx-server store

    The limits are set under `store` in models.yaml. A server prunes once an hour by itself. This
    command also works while servers are running.
    """
    show(look(load_settings(config), prune=prune), Console())


@dataclass(frozen=True)
class StoreSummary:
    path: Path
    retention: Retention
    stats: Stats | None
    """None: nothing has been stored there yet."""
    pruned: int | None = None
    """The number of records that were removed; None if pruning was not requested."""


def look(settings: Settings, *, prune: bool = False) -> StoreSummary:
    """Reads the store, also while servers have it open."""
    path, retention = settings.store.path, settings.store
    if not path.exists():
        return StoreSummary(path, retention, None)
    return asyncio.run(_visit(path, retention, prune=prune))


async def _visit(path: Path, retention: Retention, *, prune: bool) -> StoreSummary:
    store = await Store.open(path, retention)
    try:
        pruned = await store.prune() if prune else None
        return StoreSummary(path, retention, await store.stats(), pruned)
    finally:
        await store.close()


def show(summary: StoreSummary, console: Console) -> None:
    for line in _lines(summary):
        print_line(line, console)


def _lines(summary: StoreSummary) -> list[str]:
    retention = summary.retention
    limits = f"for {retention.days:g} days, at most {STORED_RESPONSES} of each"
    if (stats := summary.stats) is None:
        return [f"{summary.path}: nothing is stored yet", f"kept           {limits}"]
    pruned = [] if summary.pruned is None else [f"pruned         {summary.pruned}"]
    return [
        str(summary.path),
        *pruned,
        f"responses      {stats.responses}{_span(stats)}",
        f"conversations  {stats.conversations}",
        f"completions    {stats.completions}",
        f"items          {stats.items}",
        f"size           {stats.bytes / 1e6:.1f} MB",
        f"stored         {stats.stored / 1e6:.1f} MB, at most {retention.bytes / 1e6:.0f} MB",
        f"kept           {limits}",
    ]


def _span(stats: Stats) -> str:
    if stats.oldest is None or stats.newest is None:
        return ""
    oldest, newest = (_day(moment) for moment in (stats.oldest, stats.newest))
    return f", of {oldest}" if oldest == newest else f", from {oldest} to {newest}"


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(moment))
