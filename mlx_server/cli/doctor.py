"""`mlx-server doctor`, with the check that the engine starts here and a model loads."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from json import dumps
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlx_server.cli.machine_checks import Check, Status, examine
from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.terminal import printable
from mlx_server.engine.client import EngineClient
from mlx_server.errors import ServerError, public_message
from mlx_server.sources.demo import made_checkpoint

app = command_app()


@app.command()
def doctor(
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine and models.yaml, and show what to fix.

    \b
    mlx-server doctor
    mlx-server doctor --config team.yaml
    mlx-server doctor --json > report.json

    Please add the output to bug reports; it shows no key. The exit code is 0 if nothing failed,
    else 1.
    """
    show = as_json if json else report
    if not show(chain(examine(config), run_engine_check()), Console()):
        raise typer.Exit(1)


COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def report(checks: Iterable[Check], console: Console) -> bool:
    """Prints a table to a terminal, plain lines to a pipe. Returns whether nothing failed."""
    show = _table if console.is_terminal else _lines
    return "fail" not in show(checks, console)


def as_json(checks: Iterable[Check], console: Console) -> bool:
    """Like `report`, but prints JSON."""
    results = [asdict(check) for check in checks]
    console.out(dumps(results, indent=2), highlight=False)
    return all(check["status"] != "fail" for check in results)


def _table(checks: Iterable[Check], console: Console) -> list[Status]:
    table = Table("", "check", "found", "to do")
    done = list(checks)
    for check in done:
        status = Text(check.status, style=COLOURS[check.status])
        table.add_row(status, *map(printable, (check.name, check.found, check.fix)))
    console.print(table)
    return [check.status for check in done]


def _lines(checks: Iterable[Check], console: Console) -> list[Status]:
    statuses: list[Status] = []
    for check in checks:
        fix = f" -> {check.fix}" if check.fix else ""
        line = f"{check.status:<5}{check.name:<10}{check.found}{fix}"
        console.out(printable(line).plain, highlight=False)
        statuses.append(check.status)
    return statuses


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
