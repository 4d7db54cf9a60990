"""`mlx-server pull`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.machine_checks import budget_here
from mlx_server.cli.models import lines_for
from mlx_server.cli.root import command_app
from mlx_server.config.models_yaml import load_settings
from mlx_server.pool.models import progress_display
from mlx_server.sources.local import LocalModel
from mlx_server.sources.source import resolve
from mlx_server.sources.suggested import hub_id

app = command_app()


@app.command()
def pull(
    ids: Annotated[
        list[str], typer.Argument(metavar="ID", help="Hub ids, or names of `models --suggest`.")
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="A branch, a tag or a commit [the newest].")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the memory budget from this file.")
    ] = None,
) -> None:
    """Download models from the Hugging Face hub, to serve them offline.

    \b
    mlx-server pull mlx-community/Qwen3-4B-4bit
    mlx-server pull qwen3.5-9b
    mlx-server pull mlx-community/gpt-oss-20b-MXFP4-Q8 mlx-community/Qwen3-8B-4bit

    A model that can't be served here, or does not fit the memory budget or the disk, is refused
    before its weights are downloaded. An interrupted download is resumed. HF_TOKEN gives access to
    gated models. The lines for models.yaml are printed at the end.
    """
    budget = budget_here(load_settings(config).server.memory_budget).nbytes
    show = progress_display()
    ids = [hub_id(name, budget) for name in ids]
    for id in ids:
        folder = resolve(id, partial(show, id), revision=revision, budget=budget)
        print(f"{id} is in {folder}")
    print("\nFor models.yaml:\n")
    print(lines_for([LocalModel(id, id) for id in ids]), end="")
