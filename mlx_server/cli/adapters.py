"""`mlx-server adapters`."""

from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import app


@app.command()
def adapters(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rather than ./models.yaml.")
    ] = None,
) -> None:
    """Show the LoRA adapters, which models they fit, and what is wrong with those that fit none.

    \b
    mlx-server adapters
    mlx-server adapters --config team.yaml

    They come from the folder `adapters` beside models.yaml and from `adapters:` of its models. A
    `?` marks models that are not on this machine. The exit code is 0 if all can be served, else 1.
    """
    from rich.console import Console

    from mlx_server.cli.tables.adapters import rows_of, show
    from mlx_server.config.models_yaml import load_settings

    if not show(rows_of(load_settings(config)), Console()):
        raise typer.Exit(1)
