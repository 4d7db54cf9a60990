"""`mlx-server adapters`: the adapters of models.yaml and of the folder next to it, as a table."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.terminal import print_line, print_table
from mlx_server.config.models_yaml import ADAPTERS_DIR, load_settings
from mlx_server.config.settings import AdapterSettings, ModelSettings, Settings
from mlx_server.errors import AdapterInvalid
from mlx_server.generation.training import CARD
from mlx_server.models.adapter_catalog import (
    AdapterCatalog,
    AdapterLocation,
    check_name,
    read_base_shapes,
)
from mlx_server.models.adapter_reader import AdapterSpec
from mlx_server.pool.memory import size
from mlx_server.pool.prepare import REPLAY
from mlx_server.sources.source import adapter_on_disk, on_disk
from mlx_server.upstream.spec import is_upstream

app = command_app()


@app.command()
def adapters(
    config: ConfigFile = None,
    drop: Annotated[
        str | None, typer.Option(metavar="NAME", help="First remove an adapter that was trained.")
    ] = None,
) -> None:
    """Show the LoRA adapters and the models that they fit.

    \b
    mlx-server adapters
    mlx-server adapters --config team.yaml
    mlx-server adapters --drop letters

    They come from the folder `adapters` next to models.yaml and from `adapters:` of its models. A
    `?` marks models that are not on this machine. The exit code is 0 if all can be served, else 1.
    """
    settings = load_settings(config)
    if drop:
        _drop(settings.server.adapters_dir or Path(ADAPTERS_DIR), drop)
    if not show(rows_of(settings), Console()):
        raise typer.Exit(1)


def _drop(adapters: Path, name: str) -> None:
    check_name(name)
    if not (adapters / name / CARD).is_file():
        raise typer.BadParameter(
            f"No adapter {name!r} in {adapters} was trained by `mlx-server train` or a fine-tuning "
            "job. To remove another one, delete its folder.",
            param_hint="--drop",
        )
    dropped = adapters / f".{name}.dropped"
    (adapters / name).rename(dropped)  # a server sees all of it or nothing
    shutil.rmtree(dropped)


COLUMNS = ("name", "models", "kind", "format", "rank", "size", "base", "digest", "state")

NOT_FETCHED = "is not in the local cache: it is downloaded at the first request for it"


@dataclass
class AdapterRow:
    """One adapter, with the result of the check against each model that may use it."""

    name: str
    models: list[str] = field(default_factory=list)
    """Ids of the models that it fits, with a `?` if the model is not on this machine."""
    spec: AdapterSpec | None = None
    wrong: list[str] = field(default_factory=list)
    """Why it does not fit, one message for each of the other models."""
    not_fetched: bool = False

    @property
    def is_ok(self) -> bool:
        return self.spec is not None or self.not_fetched


def rows_of(settings: Settings) -> list[AdapterRow]:
    """Makes one row for each adapter, sorted by name. Downloads nothing."""
    rows: dict[tuple[str, Path | None], AdapterRow] = {}
    for model_id, model in settings.models.items():
        for name, path, adapter in _row_of(model, settings.server.adapters_dir):
            row = rows.setdefault((name, path), AdapterRow(name))
            if isinstance(adapter, AdapterSpec):
                row.spec = adapter
                row.models.append(model_id if on_disk(model.source) else f"{model_id}?")
            elif adapter is None:
                row.not_fetched = True
                row.models.append(f"{model_id}?")
            else:
                row.wrong.append(adapter.message)
    return sorted(rows.values(), key=lambda row: row.name)


def _row_of(
    model: ModelSettings, folder: Path | None
) -> Iterator[tuple[str, Path | None, AdapterSpec | AdapterInvalid | None]]:
    if model.source.startswith(REPLAY) or is_upstream(model.source):  # it has no layers here
        return
    base = read_base_shapes(on_disk(model.source), model.source)
    listed: dict[str, AdapterLocation] = {}
    for name, entry in model.adapters.items():
        if (location := _location_of(entry)) is None:
            yield name, None, None
        else:
            listed[name] = location
    catalog = AdapterCatalog(base, listed, folder)
    locations = catalog.locations()
    for name, adapter in catalog.all().items():
        if name in listed or name not in model.adapters:
            yield name, locations[name].path, adapter


def _location_of(entry: AdapterSettings) -> AdapterLocation | None:
    path = adapter_on_disk(entry.path)
    return AdapterLocation(path, entry.allow_other_base) if path else None


def show(rows: list[AdapterRow], console: Console) -> bool:
    """Prints the rows. Returns whether all adapters can be served."""
    if not rows:
        print_line("There are no adapters. `mlx-server train` makes one in adapters/.", console)
        return True
    print_table(COLUMNS, map(_cells, rows), console, wrapped=["models", "base"])
    for row in rows:
        if row.not_fetched:
            print_line(f"{row.name} {NOT_FETCHED}", console)
        elif not row.is_ok:
            print_line(f"{row.name}: {row.wrong[0]}", console)
    return all(row.is_ok for row in rows)


def _cells(row: AdapterRow) -> list[str]:
    models = ", ".join(row.models) or "-"
    if (spec := row.spec) is None:
        return [row.name, models, *["-"] * 6, "not fetched" if row.not_fetched else "wrong"]
    facts = (spec.kind, spec.format, str(spec.rank), size(spec.nbytes), spec.base or "-")
    return [row.name, models, *facts, spec.digest[:8], "ok"]
