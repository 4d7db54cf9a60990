"""`mlx-server models --local`: checkpoints on this machine, and the lines that serve them."""

from collections.abc import Sequence

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlx_server.cli.tables.pool import PIPE_WIDTH
from mlx_server.cli.tables.printable import printable
from mlx_server.sources.local import LocalModel

COLUMNS = ("model", "family", "weights", "fits")

NO_MODELS = (
    "No checkpoints were found in the Hugging Face cache or in LM Studio's folders. Fetch one with "
    "`mlx-server pull mlx-community/Qwen3-4B-4bit`."
)


def show(models: Sequence[LocalModel], budget: int, console: Console) -> None:
    """Prints the checkpoints, and YAML for those that fit `budget`, in bytes."""
    if not models:
        console.print(Text(NO_MODELS), soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for model in models:
        table.add_row(*map(printable, _cells(model, budget)))
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)
    for model in models:
        if model.problem:
            console.print(printable(f"{model.id}: {model.problem}"), soft_wrap=True)
    if servable := [model for model in models if fits(model, budget)]:
        console.print(Text("\nFor models.yaml:\n"))
        console.out(lines_for(servable), end="", highlight=False)


def fits(model: LocalModel, budget: int) -> bool:
    return not model.problem and model.nbytes <= budget


def lines_for(models: Sequence[LocalModel]) -> str:
    entries = {model.id: {"source": model.source} for model in models}
    return yaml.safe_dump({"models": entries}, sort_keys=False, allow_unicode=True, width=1000)


def _cells(model: LocalModel, budget: int) -> list[str]:
    if model.problem:
        return [model.id, model.family, "-", "no: see below"]
    size = f"{model.nbytes / 1e9:.1f} GB"
    return [model.id, model.family, size, "yes" if fits(model, budget) else "no: too large"]
