"""`mlx-server doctor`, with the check that the engine starts here and a model loads."""

import asyncio
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlx_server.cli.hosts import examine_hosts
from mlx_server.cli.machine_checks import Check, as_json, examine, report
from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.engine.client import EngineClient
from mlx_server.errors import ServerError, public_message
from mlx_server.sources.demo import made_checkpoint

app = command_app()


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
    show = as_json if json else report
    here = chain(examine(config), run_engine_check())
    if not show(examine_hosts(hostfile, config) if hostfile else here, Console()):
        raise typer.Exit(1)


REPORT = "please report it, with the whole output of `mlx-server doctor`"


def run_engine_check() -> Iterator[Check]:
    """Loads the demo model, if it has been made already: the doctor downloads nothing."""
    return iter(asyncio.run(_engine_checks()))


async def _engine_checks() -> list[Check]:
    engine, began = EngineClient(), time.perf_counter()
    try:
        await engine.start()
        checks = [Check("ok", "engine", f"starts in {time.perf_counter() - began:.1f} s")]
        return [*checks, await _demo(engine)]
    except (ServerError, OSError) as error:
        return [Check("fail", "engine", public_message(error), REPORT)]
    finally:
        await engine.stop()


async def _demo(engine: EngineClient) -> Check:
    if (folder := made_checkpoint()) is None:
        return Check("ok", "demo", "not made yet: the first `mlx-server serve` without models does")
    try:
        loaded = await engine.load("demo", str(folder), lambda done, total: None)
    except ServerError as error:
        return Check("fail", "demo", error.message, f"{REPORT}, or delete the model from the cache")
    return Check("ok", "demo", f"loads, {loaded.nbytes / 1e6:.0f} MB")
