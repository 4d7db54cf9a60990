"""`mlx-server models`: the models of a running server, or the checkpoints on this machine."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich.console import Console
from rich.text import Text

from mlx_server.cli.machine_checks import budget_here
from mlx_server.cli.root import ServerKey, ServerUrl, command_app
from mlx_server.cli.terminal import print_line, print_table
from mlx_server.clients.chat import (
    UNREADABLE,
    address_of,
    answered,
    client_of,
    connection_errors,
    key_at_home,
)
from mlx_server.config.models_yaml import load_settings
from mlx_server.errors import ServerError
from mlx_server.families import table
from mlx_server.pool.memory import size
from mlx_server.sources.local import LocalModel, local_models
from mlx_server.sources.suggested import SuggestedModel, suggested_models
from mlx_server.system.listening_sockets import DEFAULT_URL

app = command_app()


@app.command()
def models(
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerKey = None,
    families: Annotated[
        bool, typer.Option("--families", help="Show the supported model families instead.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Show the families as a Markdown table.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Show the checkpoints on this machine instead.")
    ] = False,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Show models of the hub that fit this machine.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the memory budget of this machine from this file."),
    ] = None,
) -> None:
    """Show a running server's models: their state, memory and use.

    \b
    mlx-server models
    mlx-server models --local
    mlx-server models --suggest
    mlx-server models --url http://studio.local:8000 --api-key KEY
    mlx-server models --families
    """
    if markdown:
        print(table.markdown(), end="")
        return
    if families:
        table.show(Console())
        return
    is_offline = suggest and os.environ.get("HF_HUB_OFFLINE", "").upper() in OFFLINE
    if is_offline:
        print("HF_HUB_OFFLINE is set, so nothing can be fetched. These are on this machine:\n")
    if local or suggest:
        budget = budget_here(load_settings(config).server.memory_budget).nbytes
    if suggest and not is_offline:
        show_suggested(budget, Console())
        return
    if local or is_offline:
        show_local(list(local_models(upcast=sys.platform != "darwin")), budget, Console())
        return
    with client_of(url, api_key or key_at_home(url)) as client:
        show_served(client, Console())


COLUMNS = ("id", "family", "source", "state", "leases", "memory", "last used")


def show_served(client: httpx.Client, console: Console) -> None:
    """Shows the server's /v1/pool. Raises ServerError if it can't be read."""
    with connection_errors():
        response = client.get("/v1/pool")
    pool = {} if response.status_code == 404 else answered(response)  # others have no such path
    try:
        show(pool, console)
    except UNREADABLE:
        raise ServerError(
            f"The server at {address_of(client.base_url)} is not mlx-server. Set --url to yours, "
            "or start one with `mlx-server serve`."
        ) from None


def show(pool: dict[str, Any], console: Console) -> None:
    used, budget, cache = (size(pool["memory"][key]) for key in ("used", "budget", "prompt_cache"))
    print_table(COLUMNS, map(_cells, pool["models"]), console, wrapped=["source"])
    for model in pool["models"]:
        if model["error"]:
            print_line(f"{model['id']} failed: {model['error']}", console)
        for row in model.get("prefilling", ()):
            done = f"{row['computed_tokens']:,} of {row['prompt_tokens']:,}"
            print_line(f"{model['id']}: prefill, {done} prompt tokens computed", console)
    print_line(f"{used} of {budget} in use, {cache} of it by the prompt cache", console)


def _cells(model: dict[str, Any]) -> list[str]:
    progress = model["progress"]
    percent = f" {100 * progress['done'] // progress['total']} %" if progress else ""
    return [
        model["id"],
        model["family"] or "-",
        model["source"],
        "failed" if model["error"] else model["state"] + percent,
        str(model["leases"]),
        size(model["bytes"]),
        _ago(model["last_used"]),
    ]


def _ago(moment: float | None) -> str:
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


OFFLINE = ("1", "ON", "YES", "TRUE")
"""The values of HF_HUB_OFFLINE that the hub's client takes as true."""

SUGGESTED_COLUMNS = ("model", "download", "context", "good at", "here")


def show_suggested(budget: int, console: Console) -> None:
    fitting = [each for each in suggested_models() if each.context_in(budget)]
    rows = [_suggested_cells(each, budget) for each in fitting]
    print_table(SUGGESTED_COLUMNS, rows, console, wrapped=["good at"])
    print_line(
        f"Of {len(suggested_models())} suggestions, {len(fitting)} fit the memory budget of "
        f"{size(budget)}, with the tokens of context that one conversation can have.",
        console,
    )
    if fitting:
        print_line(f"Fetch one with: mlx-server pull {fitting[-1].id}", console)


def _suggested_cells(model: SuggestedModel, budget: int) -> list[str]:
    facts = model.described(budget)
    context, is_here = f"{facts['context']:,}", "yes" if facts["is_here"] else "no"
    name = model.id.removeprefix("mlx-community/")  # `pull` takes it, and a terminal has 80 columns
    return [name, size(model.bytes), context, model.good_at, is_here]


LOCAL_COLUMNS = ("model", "family", "weights", "fits")

NO_MODELS = (
    "No checkpoints were found in the Hugging Face cache or in LM Studio's folders. Fetch one with "
    "`mlx-server pull`; `mlx-server models --suggest` shows which fit this machine."
)


def show_local(models: Sequence[LocalModel], budget: int, console: Console) -> None:
    """Prints the checkpoints, and YAML for those that fit `budget`, in bytes."""
    if not models:
        console.print(Text(NO_MODELS), soft_wrap=True)
        return
    rows = [_local_cells(model, budget) for model in models]
    print_table(LOCAL_COLUMNS, rows, console, wrapped=LOCAL_COLUMNS)
    for model in models:
        if model.problem:
            print_line(f"{model.id}: {model.problem}", console)
    if servable := [model for model in models if fits(model, budget)]:
        console.print(Text("\nFor models.yaml:\n"))
        console.out(lines_for(servable), end="", highlight=False)


def fits(model: LocalModel, budget: int) -> bool:
    return not model.problem and model.nbytes <= budget


def lines_for(models: Sequence[LocalModel]) -> str:
    entries = {model.id: {"source": model.source} for model in models}
    return yaml.safe_dump({"models": entries}, sort_keys=False, allow_unicode=True, width=1000)


def _local_cells(model: LocalModel, budget: int) -> list[str]:
    if model.problem:
        return [model.id, model.family, "-", "no: see below"]
    fitting = "yes" if fits(model, budget) else "no: too large"
    return [model.id, model.family, size(model.nbytes), fitting]
