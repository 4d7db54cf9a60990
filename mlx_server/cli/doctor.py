"""`mlx-server doctor`."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import ConfigFile, app


@app.command()
def doctor(
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    hostfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check the hosts of mlx.launch's hostfile instead."),
    ] = None,
) -> None:
    """Check this machine and models.yaml, and show what to fix.

    \b
    mlx-server doctor
    mlx-server doctor --config team.yaml
    mlx-server doctor --json > report.json
    mlx-server doctor --hostfile hosts.json

    Please add the output to bug reports; it shows no key. The exit code is 0 if nothing failed,
    else 1.
    """
    from rich.console import Console

    from mlx_server.cli.engine_check import run_engine_check
    from mlx_server.cli.hosts.checks import examine_hosts
    from mlx_server.cli.machine_checks import as_json, examine, report

    show = as_json if json else report
    here = chain(examine(config), run_engine_check())
    if not show(examine_hosts(hostfile, config) if hostfile else here, Console()):
        raise typer.Exit(1)
