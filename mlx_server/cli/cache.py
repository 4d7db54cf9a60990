"""`mlx-server cache`: the prompt caches on disk, by model."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.tables import print_line
from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import Settings
from mlx_server.prompt_files import DamagedFile, FileUse, PromptFile, PromptFolder, model_in
from mlx_server.system.daily_bytes import DailyBytes

app = command_app()


@app.command()
def cache(
    config: ConfigFile = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove all prompt caches from the disk.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="ID", help="With --clear: only those of this model.")
    ] = None,
) -> None:
    """Show what the prompt cache keeps on disk, and where.

    \b
    mlx-server cache
    mlx-server cache --clear
    mlx-server cache --clear --model qwen3

    The limits are set by `prompt_cache` under `server` in models.yaml. This command also works
    while servers are running, which then compute again what was removed.
    """
    if model and not clear:
        raise typer.BadParameter("--model needs --clear.")
    show(look(load_settings(config), clear=clear, model=model), Console())


UNKNOWN = "unknown"
NOT_KEPT = "prompt caches are not kept on disk: `prompt_cache: {disk: 0}` in models.yaml"


@dataclass
class ModelFiles:
    model: str
    files: int = 0
    nbytes: int = 0
    used: int = 0
    """The time of the latest use, in nanoseconds since 1970."""


@dataclass(frozen=True)
class CacheSummary:
    path: Path | None
    """None: there is no folder for them."""
    most_bytes: int
    """0: nothing is kept on disk any more."""
    models: Sequence[ModelFiles] = ()
    writes: DailyBytes | None = None
    removed: int | None = None
    """The number of files that were removed; None if that was not requested."""


def look(settings: Settings, *, clear: bool = False, model: str | None = None) -> CacheSummary:
    """Reads the folder, also while servers use it."""
    cache = settings.server.prompt_cache
    path, most = settings.kept_prompt_folder, cache.disk
    if path is None or not path.is_dir():
        return CacheSummary(path, most, removed=0 if clear else None)
    writes = DailyBytes(path, cache.disk_writes_per_day)
    folder = PromptFolder(path, most)
    folder.scan()
    groups = folder.by_group()
    names = {group: _model(folder, files) for group, files in groups.items()}
    if not clear:
        return CacheSummary(path, most, _by_model(groups, names), writes)
    folder.remove_drafts()
    before = folder.count
    folder.remove_if(lambda file: model in (None, names[file.group]))
    removed = before - folder.count
    return CacheSummary(path, most, _by_model(folder.by_group(), names), writes, removed)


def _model(folder: PromptFolder, files: Sequence[tuple[PromptFile, FileUse]]) -> str:
    """The model of a group, as the first readable one of its files says."""
    for file, _ in files[:8]:
        with suppress(OSError, DamagedFile):
            if model := model_in(folder.place(file)):
                return model
    return UNKNOWN


def _by_model(
    groups: dict[str, list[tuple[PromptFile, FileUse]]], names: dict[str, str]
) -> list[ModelFiles]:
    models: dict[str, ModelFiles] = {}
    for group, files in groups.items():
        own = models.setdefault(names[group], ModelFiles(names[group]))
        own.files += len(files)
        own.nbytes += sum(use.nbytes for _, use in files)
        own.used = max(own.used, *(use.used for _, use in files))
    return sorted(models.values(), key=lambda each: -each.nbytes)


def show(summary: CacheSummary, console: Console) -> None:
    for line in _lines(summary):
        print_line(line, console)


def _lines(summary: CacheSummary) -> list[str]:
    removed = [] if summary.removed is None else [f"removed        {summary.removed} files"]
    if summary.path is None or not (summary.most_bytes or summary.models):
        return [NOT_KEPT, *removed]
    nbytes = sum(each.nbytes for each in summary.models)
    left = [] if summary.most_bytes else [f"{NOT_KEPT}; these files were left there before"]
    return [
        *left,
        str(summary.path),
        *removed,
        f"size           {nbytes / 1e6:.1f} MB, at most {summary.most_bytes / 1e6:.0f} MB",
        *([f"written today  {_of(summary.writes)}"] if summary.writes else []),
        *map(_line, summary.models),
    ]


def _of(writes: DailyBytes) -> str:
    return f"{writes.today / 1e6:.1f} MB by all servers, at most {writes.most / 1e6:.0f} MB a day"


def _line(each: ModelFiles) -> str:
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used / 1e9))
    return f"{each.model}: {each.files} files, {each.nbytes / 1e6:.1f} MB, last used {day}"
