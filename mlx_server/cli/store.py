"""`mlx-server store`."""

from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import app


@app.command()
def store(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rather than ./models.yaml.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what is too old or too much, first.")
    ] = False,
) -> None:
    """Show what is stored of responses and conversations, and where.

    \b
    mlx-server store
    mlx-server store --prune
    MLX_SERVER_DATA=/srv/mlx mlx-server store

    How long and how many are kept is set under `store` in models.yaml; a server prunes by itself,
    once an hour. This works beside a running one, too.
    """
    from rich.console import Console

    from mlx_server.cli.tables.store import look, show
    from mlx_server.config.models_yaml import load_settings

    show(look(load_settings(config), prune=prune), Console())
