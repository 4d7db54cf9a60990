"""`mlx-server adapters`."""

import typer

from mlx_server.cli.root import ConfigFile, app


@app.command()
def adapters(
    config: ConfigFile = None,
) -> None:
    """Show the LoRA adapters and the models that they fit.

    \b
    mlx-server adapters
    mlx-server adapters --config team.yaml

    They come from the folder `adapters` next to models.yaml and from `adapters:` of its models. A
    `?` marks models that are not on this machine. The exit code is 0 if all can be served, else 1.
    """
    from rich.console import Console

    from mlx_server.cli.tables.adapters import rows_of, show
    from mlx_server.config.models_yaml import load_settings

    if not show(rows_of(load_settings(config)), Console()):
        raise typer.Exit(1)
