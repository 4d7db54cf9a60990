"""`mlx-server cache`."""

from typing import Annotated

import typer

from mlx_server.cli.root import ConfigFile, app


@app.command()
def cache(
    config: ConfigFile = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove all prompt caches from the disk.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="ID", help="With --clear: only those of this model.")
    ] = None,
) -> None:
    """Show what the prompt cache keeps on disk, and where.

    \b
    mlx-server cache
    mlx-server cache --clear
    mlx-server cache --clear --model qwen3

    The limit is set by `prompt_cache` under `server` in models.yaml. This command also works while
    a server is running, which then computes again what was removed.
    """
    from rich.console import Console

    from mlx_server.cli.tables.cache import look, show
    from mlx_server.config.models_yaml import load_settings

    if model and not clear:
        raise typer.BadParameter("--model needs --clear.")
    show(look(load_settings(config), clear=clear, model=model), Console())
