"""`mlx-server train`."""

import asyncio
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mlx_server import limits
from mlx_server.api.training_data import STORED, samples_of, stored_lines
from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.config.models_yaml import ADAPTERS_DIR, load_settings, spec_named
from mlx_server.config.settings import Settings
from mlx_server.engine.training import TrainingMethod, TrainingProcess
from mlx_server.generation.training import TRAINING, Training, check_trainable, split
from mlx_server.http.security import client_states
from mlx_server.models.adapter_catalog import check_name
from mlx_server.pool.models import progress_display
from mlx_server.pool.prepare import prepare
from mlx_server.store import Store

app = command_app()


@app.command()
def train(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A model of models.yaml.")],
    data: Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="Conversations to learn.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The adapter's name [the data's].")
    ] = None,
    epochs: Annotated[
        int, typer.Option(min=1, max=1000, help="How often each sample is learnt.")
    ] = 3,
    learning_rate: Annotated[float, typer.Option(min=0, max=1e30)] = 1e-4,
    batch_size: Annotated[int, typer.Option(min=1, max=1000, help="Samples of a step.")] = 4,
    rank: Annotated[int, typer.Option(min=1, max=limits.ADAPTER_RANK)] = 8,
    layers: Annotated[
        int, typer.Option(min=-1, max=limits.CHECKPOINT_LAYERS, help="The last layers; -1: all.")
    ] = 16,
    kind: Annotated[Literal["lora", "dora"], typer.Option()] = "lora",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    config: ConfigFile = None,
) -> None:
    """Train a LoRA adapter, and publish it if it is better than its base model.

    \b
    mlx-server train qwen3 letters.jsonl
    mlx-server train qwen3 letters.jsonl --epochs 5 --learning-rate 2e-4
    mlx-server train qwen3 stored:rating=good

    Each line is a conversation: {"messages": [...]}. Its last message, the assistant's, is learnt.
    stored:KEY=VALUE: the stored chat completions with this metadata. A tenth is held out: only an
    adapter that is better on it than the base model, and not much worse on public texts, gets into
    the folder of adapters, where a running server finds it as BASE:NAME. The same command goes on
    with a training that was interrupted. The exit code is 0 if an adapter was published, else 1.
    """
    stored = STORED.fullmatch(str(data))
    if not stored and not data.is_file():
        raise typer.BadParameter(f"There is no file {str(data)!r}.", param_hint="DATA.jsonl")
    name = name or (stored[2] if stored else data.stem)
    check_name(name)
    settings = load_settings(config)
    adapters = settings.server.adapters_dir or Path(ADAPTERS_DIR)
    if (adapters / name).exists():
        message = f"There is an adapter {name!r} in {adapters}. Choose another --name."
        raise typer.BadParameter(message, param_hint="--name")
    check_trainable(spec := spec_named(config, base))
    show = progress_display()
    prepared = prepare(spec, lambda *done: show(base, *done), upcast=False)
    with (
        BytesIO(asyncio.run(stored_data(settings, *stored.groups())))
        if stored
        else data.open("rb") as lines
    ):
        samples = split(prepared, samples_of(prepared, lines), (), seed)
    method = TrainingMethod(
        kind=kind,
        rank=rank,
        layers=layers,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
    )
    assert settings.store.data_dir
    folder = settings.store.data_dir / TRAINING
    training = Training.of(folder, prepared, samples, method, epochs)
    with suppress(KeyboardInterrupt):
        asyncio.run(_run(training))
    if not training.judged:
        print("The training was interrupted. The same command goes on with it.")
        raise typer.Exit(1)
    _table(training)
    if why := training.why_not():
        print(f"No adapter was published. {why}")
        raise typer.Exit(1)
    path = training.publish(adapters, name)
    training.drop()
    print(f"{base}:{name} is in {path}. To drop it: mlx-server adapters --drop {name}")


async def stored_data(settings: Settings, key: str, value: str) -> bytes:
    """The lines of the stored chat completions of all clients that were marked so."""
    store = await Store.open(settings.store.path, settings.store)
    owners = client_states(settings.server.keys)
    try:
        lines = [line for owner in owners async for line in stored_lines(store, owner, key, value)]
    finally:
        await store.close()
    return b"".join(lines)


async def _run(training: Training) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("training", total=training.job.steps)
        async for report in TrainingProcess(training.folder).reports():
            training.take(report)
            loss = "" if training.loss is None else f", loss {training.loss:.3f}"
            progress.update(bar, completed=training.step, description=f"training{loss}")


def _table(training: Training) -> None:
    for each in training.evaluated:
        name = f"after step {each.step}" if each.step else "base model"
        print(f"{name}: validation loss {each.held_out:.3f}")
    assert training.judged
    base, adapter = training.judged.base.public, training.judged.adapter.public
    print(f"public texts: loss {adapter:.3f} with the adapter, {base:.3f} without")
