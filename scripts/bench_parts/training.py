"""Measures what a training costs next to `mlx_lm.lora` with the same settings, in processor time:
each runs by this module, which writes down when its parts end."""

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from bench_parts.contenders import child_process, fast
from bench_parts.models import model_folder
from bench_parts.tables import Row

VARIABLE = "MLX_SERVER_MARKS"
"""It names the file of the marks."""

EPOCHS, BATCH, LAYERS, RATE = 4, 4, 16, 1e-4
START, STEPS, LOSSES, JUDGE = PARTS = ("start", "steps", "held-out losses", "judge")
WHAT = {
    START: "Python's imports, the data, the model",
    STEPS: "the training itself",
    LOSSES: "what is held out, by the trainer",
    JUDGE: "the adapter and its base as the engine computes them",
}
NAMES = {"mlx_lm": "mlx_lm.lora", "ours": "mlx-server train"}


class Marks:
    """The processor time that went to each part."""

    def __init__(self) -> None:
        self._file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND)
        self._before = 0.0

    def ends(self, part: str, more: float = 0.0) -> None:
        """more: the seconds of a process that still runs."""
        used = time.process_time() + more
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        used += ended.ru_utime + ended.ru_stime
        os.write(self._file, f"{part}:{used - self._before}\n".encode())
        self._before = used


def _run_ours() -> None:
    from mlx_server.cli import main
    from mlx_server.engine.training import Evaluated, Trained, TrainingReport
    from mlx_server.generation.training import Training

    marks, take = Marks(), Training.take

    def taken(training: Training, report: TrainingReport) -> None:
        take(training, report)
        used = 0.0
        for each in psutil.Process().children():
            if "mlx_server.worker.trainer" in each.cmdline():
                used = sum(each.cpu_times()[:2])
        match report:
            case Trained():
                marks.ends(STEPS, used)
            case Evaluated(step=0):
                marks.ends(START, used)
            case Evaluated():
                marks.ends(LOSSES, used)
            case _:
                marks.ends(JUDGE, used)

    setattr(Training, "take", taken)  # noqa: B010  mypy knows it as a method
    main()


def _run_mlx_lm() -> None:
    from mlx_lm import lora
    from mlx_lm.tuner import trainer

    marks = Marks()
    train, evaluate = lora.train, trainer.evaluate

    def training(**options: Any) -> None:
        marks.ends(START)
        train(**options)
        marks.ends(STEPS)

    def evaluating(**options: Any) -> Any:
        marks.ends(STEPS)
        loss = evaluate(**options)
        marks.ends(LOSSES)
        return loss

    lora.train, trainer.evaluate = training, evaluating
    lora.main()


def samples() -> list[str]:
    from train_parts.samples import SAMPLES, conversations

    return [json.dumps({"messages": each}) for each in conversations(SAMPLES["pirate"])]


@dataclass(frozen=True)
class TrainingCosts:
    steps: int
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of the processors, by program and part."""


def costs(model: str = "real", epochs: int = EPOCHS) -> TrainingCosts:
    folder, lines = model_folder(model), samples()
    order = [*lines]
    Random(0).shuffle(order)  # as `generation.training.split` does  # noqa: S311
    count = round(0.1 * len(order))
    steps = epochs * ((len(order) - count) // BATCH)
    with TemporaryDirectory() as own:
        data = Path(own)
        (data / "all.jsonl").write_text("\n".join(lines) + "\n")
        (data / "valid.jsonl").write_text("\n".join(order[:count]) + "\n")
        (data / "train.jsonl").write_text("\n".join(order[count:]) + "\n")
        config = {"models": {"base": {"source": str(folder)}}}
        (data / "models.yaml").write_text(json.dumps(config))
        common = ["--batch-size", str(BATCH), "--learning-rate", str(RATE)]
        theirs = [
            *("--model", str(folder), "--train", "--data", own, "--mask-prompt"),
            *("--iters", str(steps), "--num-layers", str(LAYERS), "--val-batches", "-1"),
            *("--adapter-path", f"{own}/theirs", *common),
        ]
        ours = ["train", "base", "all.jsonl", "--config", "models.yaml", "--layers", str(LAYERS)]
        ours += ["--epochs", str(epochs), *common]
        found = {"mlx_lm": _seconds("mlx_lm", theirs, data), "ours": _seconds("ours", ours, data)}
    return TrainingCosts(steps, found)


def _seconds(program: str, arguments: list[str], folder: Path) -> dict[str, float]:
    marks = folder / program
    marks.touch()
    variables = {**fast(), VARIABLE: str(marks), "MLX_SERVER_DATA": str(folder / "data")}
    with child_process(["bench_parts.training", program, *arguments], folder, variables) as process:
        process.communicate()
        if code := process.returncode:
            raise RuntimeError(f"{NAMES[program]} ended with {code}.")
    seconds = Counter[str]()
    for part, used in (line.split(":") for line in marks.read_text().splitlines()):
        seconds[part] += float(used)  # type: ignore[assignment]
    return dict(seconds)


COLUMNS = ("processor seconds", *NAMES.values(), "times")


def rows(found: TrainingCosts) -> Iterator[Row]:
    theirs, ours = (found.seconds[program] for program in NAMES)
    for part, what in WHAT.items():
        yield _row(f"{part}: {what}", theirs.get(part, 0.0), ours.get(part, 0.0))
    yield _row(f"all, {found.steps} steps", sum(theirs.values()), sum(ours.values()))


def _row(name: str, theirs: float, ours: float) -> Row:
    return name, f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}" if theirs else ""


if __name__ == "__main__":
    program = sys.argv.pop(1)
    sys.argv[0] = "mlx-server"
    (_run_ours if program == "ours" else _run_mlx_lm)()
