"""Trains an adapter with mlx-lm's trainer: `python -m mlx_server.worker.trainer FOLDER`.

It reads the job and its samples from the folder, see `engine.training`, and writes reports to its
stdout. After SAVED_STEPS steps, and when it ends early, it saves all that decides the next step:
the adapter's weights and the optimizer's state; random numbers follow from the seed and the number
of the step. So a process that goes on from there makes the same adapter, bit for bit.

A step lasts as long as the samples of one batch take, forth and back. Controls on stdin are obeyed
between two of them.
"""

import gc
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.trainer import TrainingArgs, evaluate, iterate_batches, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_server.engine.comparison import Side
from mlx_server.engine.training import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    EVALUATIONS,
    JOB,
    SAMPLES,
    Evaluated,
    Judged,
    Losses,
    Trained,
    TrainingJob,
    TrainingReport,
    TrainingSample,
    TrainingSamples,
    file_of,
    kept_reports,
)
from mlx_server.system.files import lock_within
from mlx_server.system.process import run_after_others
from mlx_server.worker.comparison import LoadedSide
from mlx_server.worker.server_connection import leave
from mlx_server.worker.weights import loaded

STATE, LAST = "state.safetensors", "last.safetensors"
LOCK = "lock"
"""Of the process that writes into the folder: the one of a server that was killed makes its step
and saves it while the next server's is there already."""

SAVED_STEPS = 20
PATIENCE_SECONDS = 60.0
"""How long a step may take that is under way when the server ends."""


class Controls:
    """What the server wants: see `TrainingProcess`."""

    def __init__(self) -> None:
        self._unpaused = threading.Event()
        self._unpaused.set()
        self._is_ended = False

    def read(self) -> None:
        for line in sys.stdin.buffer:
            if line == b"pause\n":
                self._unpaused.clear()
            else:
                self._unpaused.set()
        self._is_ended = True
        self._unpaused.set()
        threading.Event().wait(PATIENCE_SECONDS)
        os._exit(1)

    def may_go_on(self) -> bool:
        """Waits while the training is paused, with no memory for buffers. False at its end."""
        if not self._unpaused.is_set():
            mx.clear_cache()
            self._unpaused.wait()
        return not self._is_ended


class Dataset:
    """Samples, as mlx-lm's trainer reads them."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> tuple[Sequence[int], int]:
        sample = self._samples[index]
        return sample.tokens, sample.prompt

    def __len__(self) -> int:
        return len(self._samples)


class Trainer:
    def __init__(
        self, folder: Path, report: Callable[[TrainingReport], None], controls: Controls
    ) -> None:
        self._folder, self._report, self._controls = folder, report, controls
        self._job, self._samples = _read_job(folder)
        method = self._job.method
        mx.random.seed(method.seed)
        self._model = loaded(Path(self._job.checkpoint))
        self._base = self._model.leaf_modules()
        mx.random.seed(method.seed)
        _give_adapter(self._model, self._job)
        self._optimizer = optimizers.Adam(learning_rate=method.learning_rate)
        self._optimizer.init(self._model.trainable_parameters())
        self._step = self._read_state()

    def run(self) -> nn.Module:
        """Returns the model without the adapter."""
        if self._step == 0:
            self._evaluate()
        longest = max(len(each.tokens) for each in self._samples.learnt)
        left = self._job.steps - self._step
        arguments = TrainingArgs(
            batch_size=self._job.method.batch_size,
            iters=left + 1,  # the batches end the training, after the last step
            steps_per_report=1,
            steps_per_save=left + 2,
            max_seq_length=longest + 1,
            adapter_file=str(self._folder / LAST),
        )
        train(
            self._model,
            self._optimizer,
            Dataset(self._samples.learnt),
            args=arguments,
            iterate_batches=self._batches,
            training_callback=self,
        )
        self._model.update_modules(self._base)
        return self._model.eval()

    def on_train_loss_report(self, numbers: dict[str, Any]) -> None:
        if not isfinite(loss := numbers["train_loss"]):
            raise ValueError(
                f"the loss of step {self._step} is no number; a lower learning rate may help"
            )
        self._report(Trained(self._step, loss))

    def _batches(self, dataset: Dataset, **settings: Any) -> Iterator[tuple[mx.array, mx.array]]:
        """The batches that are left, between which the training is saved, evaluated and paused."""
        settings["seed"] = self._job.method.seed
        batches = islice(iterate_batches(dataset, **settings), self._step, None)
        while self._step < self._job.steps and self._controls.may_go_on():
            self._step += 1
            mx.random.seed(self._job.method.seed + self._step)  # of the dropout
            yield next(batches)
            is_last = self._step == self._job.steps
            if is_last or self._step % self._job.steps_per_epoch == 0:
                self._evaluate()
            if is_last or self._step % SAVED_STEPS == 0:
                self._save_state()
        self._save_state()

    def _evaluate(self) -> None:
        longest = max(len(each.tokens) for each in self._samples.held_out) + 1
        with _numpy_state_kept():
            loss = evaluate(self._model, Dataset(self._samples.held_out), 1, -1, longest)
        self._model.train()
        if self._step:
            weights = dict(tree_flatten(self._model.trainable_parameters()))
            _write(self._folder / file_of(self._step), weights)
        evaluated = Evaluated(self._step, float(loss))
        _keep(self._folder, evaluated)
        self._report(evaluated)

    def _save_state(self) -> None:
        state = {"model": self._model.trainable_parameters(), "optimizer": self._optimizer.state}
        _write(self._folder / STATE, dict(tree_flatten(state)), {"step": str(self._step)})

    def _read_state(self) -> int:
        """Returns the number of steps that were made."""
        if not (self._folder / STATE).is_file():
            return 0
        found: Any = mx.load(str(self._folder / STATE), return_metadata=True)
        arrays, metadata = found
        state: Any = tree_unflatten([*arrays.items()])
        self._model.update(state["model"])
        self._optimizer.state = state["optimizer"]
        return int(metadata["step"])


def judge(
    folder: Path,
    base: nn.Module,
    report: Callable[[TrainingReport], None],
    wait: Callable[[], object],
) -> None:
    """Compares the best adapter with its base model, both as the engine computes them."""
    (job, samples), adapter = _read_job(folder), folder / ADAPTER
    evaluated = [each for each in kept_reports(folder) if isinstance(each, Evaluated) and each.step]
    best = min(evaluated, key=lambda each: each.held_out)
    shutil.copy(folder / file_of(best.step), adapter / ADAPTER_WEIGHTS)
    gc.collect()  # the optimizer and the buffers of the training
    mx.clear_cache()

    def losses(path: str | None) -> Losses:
        side = LoadedSide(base, Side(checkpoint=job.checkpoint, adapter=path), wait)
        held_out, public = (_loss(side, each) for each in (samples.held_out, samples.public))
        return Losses(held_out, public)

    judged = Judged(best.step, losses(None), losses(str(adapter)))
    _keep(folder, judged)
    report(judged)


def _loss(side: LoadedSide, samples: Sequence[TrainingSample]) -> float:
    logprobs = (side.logprobs(each.tokens, max(0, each.prompt - 1)) for each in samples)
    return -float(np.mean([logprob for each in logprobs for logprob in each]))


def _read_job(folder: Path) -> tuple[TrainingJob, TrainingSamples]:
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=TrainingJob)
    return job, msgspec.msgpack.decode((folder / SAMPLES).read_bytes(), type=TrainingSamples)


def _keep(folder: Path, report: Evaluated | Judged) -> None:
    """For a process that goes on, and a server that reads no report."""
    with (folder / EVALUATIONS).open("ab") as file:
        file.write(msgspec.json.encode(report) + b"\n")


def _give_adapter(model: nn.Module, job: TrainingJob) -> None:
    method = job.method
    model.freeze()
    parameters = {"rank": method.rank, "scale": method.scale, "dropout": method.dropout}
    linear_to_lora_layers(model, method.layers, parameters, use_dora=method.kind == "dora")
    model.train()


@contextmanager
def _numpy_state_kept() -> Iterator[None]:
    """mlx-lm orders the batches by numpy's state, that of an evaluation too."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


def _write(file: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    unfinished = file.with_suffix(".unfinished.safetensors")
    mx.save_safetensors(str(unfinished), arrays, metadata or {})
    os.replace(unfinished, file)


@contextmanager
def alone_in(folder: Path, seconds: float = PATIENCE_SECONDS + 5) -> Iterator[None]:
    """Waits so long for another process of the folder. Raises RuntimeError if it stays."""
    with (folder / LOCK).open("a+b") as lock:
        if not lock_within(seconds, lock.fileno(), LOCK_EX):
            lock.seek(0)
            holder = lock.read(20).decode(errors="replace")
            raise RuntimeError(f"process {holder} trains with the same data and settings already")
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
        lock.flush()
        yield


def main() -> None:
    run_after_others()
    reports = sys.stdout.buffer
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  mlx-lm prints what it does
    controls = Controls()
    threading.Thread(target=controls.read, daemon=True).start()

    def report(each: TrainingReport) -> None:
        reports.write(msgspec.json.encode(each) + b"\n")
        reports.flush()

    def wait() -> None:
        if not controls.may_go_on():
            leave(0)

    folder = Path(sys.argv[1])
    try:
        with alone_in(folder):
            base = Trainer(folder, report, controls).run()
            wait()
            judge(folder, base, report, wait)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        leave(1)
    leave(0)  # while the other thread reads


if __name__ == "__main__":
    main()
