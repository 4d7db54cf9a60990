"""The typer app that every command registers with."""

from pathlib import Path
from typing import Annotated

import typer

from mlx_server import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # its tracebacks may show local variables, keys among them
)


ConfigFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Read this file instead of ./models.yaml.")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-server {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve language models on this machine through the OpenAI API.

    \b
    mlx-server serve                         serve the models of models.yaml, or a small demo
    mlx-server chat                          chat with a model
    mlx-server connect codex --write --run   let a coding agent use this server
    mlx-server doctor                        check this machine and models.yaml
    """
