"""Trains a sample adapter on the demo model with mlx-lm's own trainer."""

import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from mlx_server.engine.engine_process import fast_blas
from mlx_server.sources.demo import demo_checkpoint
from train_parts.samples import SAMPLES, Sample

ADAPTERS = Path(__file__).parents[2] / "adapters"
BASE = "demo:smollm2"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    name: Annotated[str, typer.Argument(metavar="NAME", help=" or ".join(SAMPLES))],
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Output folder; adapters/NAME by default.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="Number of training steps.")] = None,
) -> None:
    """Train a sample adapter for the demo model, from data that this script makes.

    \b
    scripts/train_sample_adapter pirate
    scripts/train_sample_adapter json-answer --output ./json-answer
    """
    if name not in SAMPLES:
        raise typer.BadParameter(f"There is no sample {name!r}; there are {', '.join(SAMPLES)}.")
    _with_fast_blas()
    from train_parts.training import train_adapter

    checkpoint = demo_checkpoint(lambda *progress: None)
    folder = output or ADAPTERS / name
    with TemporaryDirectory() as work:
        train_adapter(SAMPLES[name], checkpoint, Path(work), iterations)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(work) / "adapters.safetensors", folder)
    config = json.dumps(_config(SAMPLES[name]), indent=2)
    (folder / "adapter_config.json").write_text(config + "\n", "utf-8")
    size = (folder / "adapters.safetensors").stat().st_size
    typer.echo(f"{folder}: {size / 1000:.0f} kB")


def _with_fast_blas() -> None:
    """Restarts this program with a fast BLAS: libraries are preloaded only at a start."""
    blas = fast_blas()
    if blas and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = blas
        os.execv(sys.executable, [sys.executable, "-m", "train_parts", *sys.argv[1:]])  # noqa: S606


def _config(sample: Sample) -> dict[str, object]:
    """Returns the configuration in mlx-lm's format. The model is named as in models.yaml, not by
    its folder on this machine."""
    return {
        "model": BASE,
        "fine_tune_type": "lora",
        "num_layers": sample.layers,
        "lora_parameters": {
            "rank": sample.rank,
            "scale": sample.scale,
            "dropout": 0.0,
            "keys": list(sample.keys),
        },
    }


app(prog_name="scripts/train_sample_adapter")
