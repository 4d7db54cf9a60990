"""`mlx-server cache`: the prompt caches on disk, by model."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.terminal import print_line
from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import Settings
from mlx_server.pool.memory import size
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
    console = Console()
    for line in _report(load_settings(config), clear=clear, model=model):
        print_line(line, console)


UNKNOWN = "unknown"
NOT_KEPT = "prompt caches are not kept on disk: `prompt_cache: {disk: 0}` in models.yaml"


def _report(settings: Settings, *, clear: bool, model: str | None) -> Iterator[str]:
    """Reads the folder, also while servers use it."""
    cache, path = settings.server.prompt_cache, settings.kept_prompt_folder
    removed, models = 0, defaultdict[str, list[FileUse]](list)
    is_there = path is not None and path.is_dir()
    if path and is_there:
        folder = PromptFolder(path, cache.disk)
        folder.scan()
        names = {group: _model(folder, files) for group, files in folder.by_group().items()}
        if clear:
            folder.remove_drafts()
            removed = folder.count
            folder.remove_if(lambda file: model in (None, names[file.group]))
            removed -= folder.count
        for group, files in folder.by_group().items():
            models[names[group]] += (use for _, use in files)
    is_kept = path is not None and (cache.disk or models)
    if not cache.disk or not is_kept:
        yield f"{NOT_KEPT}; these files were left there before" if is_kept else NOT_KEPT
    if is_kept:
        yield str(path)
    if clear:
        yield f"removed        {removed} files"
    if not is_kept:
        return
    sizes = {name: sum(use.nbytes for use in uses) for name, uses in models.items()}
    nbytes = sum(sizes.values())
    yield f"size           {size(nbytes)}, at most {size(cache.disk)}"
    if path and is_there:
        writes = DailyBytes(path, cache.disk_writes_per_day)
        yield (
            f"written today  {size(writes.today)} by all servers, at most {size(writes.most)} a day"
        )
    for name, nbytes in sorted(sizes.items(), key=lambda each: -each[1]):
        used = time.localtime(max(use.used for use in models[name]) / 1e9)
        day = time.strftime("%Y-%m-%d %H:%M", used)
        yield f"{name}: {len(models[name])} files, {size(nbytes)}, last used {day}"


def _model(folder: PromptFolder, files: Sequence[tuple[PromptFile, FileUse]]) -> str:
    """The model of a group, as the first readable one of its files says."""
    for file, _ in files[:8]:
        with suppress(OSError, DamagedFile):
            if model := model_in(folder.place(file)):
                return model
    return UNKNOWN
