"""`mlx-server doctor`."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import app


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rather than ./models.yaml.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check this machine and models.yaml, and say what to do: what a bug report needs.

    \b
    mlx-server doctor
    mlx-server doctor --config team.yaml
    mlx-server doctor --json > report.json
    mlx-server doctor | grep fail

    It shows no key. The exit code is 0 if nothing failed, else 1.
    """
    from rich.console import Console

    from mlx_server.cli.engine_check import run_engine_check
    from mlx_server.cli.machine_checks import as_json, examine, report

    show = as_json if json else report
    if not show(chain(examine(config), run_engine_check()), Console()):
        raise typer.Exit(1)
