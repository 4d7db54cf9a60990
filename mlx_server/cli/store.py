"""`mlx-server store`."""

from typing import Annotated

import typer

from mlx_server.cli.root import ConfigFile, app


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
    command also works while a server is running.
    """
    from rich.console import Console

    from mlx_server.cli.tables.store import look, show
    from mlx_server.config.models_yaml import load_settings

    show(look(load_settings(config), prune=prune), Console())
