"""`mlx-server store`: what is stored of responses and conversations."""

import asyncio
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.terminal import print_line
from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import StoreSettings
from mlx_server.limits import STORED_RESPONSES
from mlx_server.pool.memory import size
from mlx_server.store import Stats, Store

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
    console = Console()
    for line in _report(load_settings(config).store, prune=prune):
        print_line(line, console)


def _report(settings: StoreSettings, *, prune: bool) -> Iterator[str]:
    """Reads the store, also while servers have it open."""
    if settings.path.exists():
        pruned, stats = asyncio.run(_visit(settings, prune=prune))
        yield str(settings.path)
        if prune:
            yield f"pruned         {pruned}"
        yield f"responses      {stats.responses}{_span(stats)}"
        yield f"conversations  {stats.conversations}"
        yield f"completions    {stats.completions}"
        yield f"items          {stats.items}"
        yield f"size           {size(stats.bytes)} on disk"
        yield f"content        {size(stats.stored)}, at most {size(settings.bytes)}"
    else:
        yield f"{settings.path}: nothing is stored yet"
    yield f"kept           for {settings.days:g} days, at most {STORED_RESPONSES} of each"


async def _visit(settings: StoreSettings, *, prune: bool) -> tuple[int, Stats]:
    store = await Store.open(settings.path, settings)
    try:
        return await store.prune() if prune else 0, await store.stats()
    finally:
        await store.close()


def _span(stats: Stats) -> str:
    if stats.oldest is None or stats.newest is None:
        return ""
    oldest, newest = (_day(moment) for moment in (stats.oldest, stats.newest))
    return f", of {oldest}" if oldest == newest else f", from {oldest} to {newest}"


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(moment))
