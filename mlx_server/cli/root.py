"""What all commands hang on."""

from typing import Annotated

import typer

from mlx_server import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # its tracebacks may show local variables, keys among them
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-server {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit.")
    ] = False,
) -> None:
    """Serve language models on this machine, with the OpenAI API.

    \b
    mlx-server serve                         serve what models.yaml lists, or a small demo
    mlx-server chat                          talk to it
    mlx-server doctor                        is this machine fit, and is models.yaml right?
    """
