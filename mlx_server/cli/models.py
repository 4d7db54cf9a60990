"""`mlx-server models`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import app


@app.command()
def models(
    url: Annotated[str, typer.Option(help="URL of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key [the first of MLX_SERVER_API_KEYS].")
    ] = None,
    families: Annotated[
        bool, typer.Option("--families", help="Show the supported model families instead.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Show the families as a Markdown table.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Show the checkpoints on this machine instead.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the memory budget of --local from this file."),
    ] = None,
) -> None:
    """Show a running server's models: their state, memory and use.

    \b
    mlx-server models
    mlx-server models --local
    mlx-server models --url http://studio.local:8000 --api-key KEY
    mlx-server models --families
    """
    from rich.console import Console

    if markdown:
        from mlx_server.families.table import markdown as table

        print(table(), end="")
        return
    if families:
        from mlx_server.families.table import show as show_families

        show_families(Console())
        return
    if local:
        from mlx_server.cli.machine_checks import budget_here
        from mlx_server.cli.tables.local import show as show_local
        from mlx_server.config.models_yaml import load_settings
        from mlx_server.sources.local import local_models

        budget = budget_here(load_settings(config).server.memory_budget).nbytes
        show_local(list(local_models(upcast=sys.platform != "darwin")), budget, Console())
        return
    from mlx_server.cli.tables.pool import pool_of, show
    from mlx_server.clients.chat import client_of, key_at_home

    with client_of(url, api_key or key_at_home()) as client:
        show(pool_of(client), Console())
