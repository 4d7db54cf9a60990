"""The training of an adapter: what is trained, and the process that does it.

The process is given a folder. It has the job and its samples, and everything that a later process
needs to go on where this one ended, so it may be killed at any moment.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from mlx_server.engine.engine_process import process_environment
from mlx_server.errors import TrainingFailed

JOB, SAMPLES, EVALUATIONS = "job.json", "samples.msgpack", "evaluations.jsonl"
ADAPTER_WEIGHTS = "adapters.safetensors"
ADAPTER = "adapter"
"""The folder, in that of the job, of the adapter that may be published."""
STDERR_BYTES = 2000


class TrainingMethod(msgspec.Struct, frozen=True, kw_only=True):
    """How an adapter is trained; the names are those of `mlx_lm.lora`."""

    kind: Literal["lora", "dora"] = "lora"
    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    layers: int = 16
    """The last layers, which get an adapter; -1: all."""
    batch_size: int = 4
    learning_rate: float = 1e-4
    seed: int = 0


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    """The folder of the base model."""
    steps: int
    steps_per_epoch: int
    tokens: int
    """What the process has learnt at the end, each epoch counted."""
    method: TrainingMethod = TrainingMethod()


class TrainingSample(msgspec.Struct, frozen=True, array_like=True):
    tokens: Sequence[int]
    prompt: int
    """How many of the tokens are the prompt, which is not learnt."""


class TrainingSamples(msgspec.Struct, frozen=True):
    learnt: Sequence[TrainingSample]
    held_out: Sequence[TrainingSample]
    """What decides whether the adapter is better than its base model."""
    public: Sequence[TrainingSample]
    """Texts on which the adapter may not be much worse than its base model."""


class Trained(msgspec.Struct, frozen=True, tag=True):
    """Some steps were made."""

    step: int
    loss: float


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """step: 0 for the base model. What the adapter is after that step is in `file_of(step)`."""

    step: int
    held_out: float
    """The mean loss a token of what is held out, as the trainer measures it."""


class Losses(msgspec.Struct, frozen=True):
    """The mean loss a token, computed as the engine serves the model."""

    held_out: float
    public: float


class Judged(msgspec.Struct, frozen=True, tag=True):
    """The end: the adapter of the best step is in `ADAPTER`, and was compared with its base."""

    step: int
    base: Losses
    adapter: Losses


TrainingReport = Trained | Evaluated | Judged

_decoder: msgspec.json.Decoder[TrainingReport] = msgspec.json.Decoder(TrainingReport)


def file_of(step: int) -> str:
    return f"{step:07d}_{ADAPTER_WEIGHTS}"


def kept_reports(folder: Path) -> list[Evaluated | Judged]:
    """The reports of all processes of the folder, but for those of steps."""
    with suppress(FileNotFoundError):
        lines = (folder / EVALUATIONS).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Evaluated | Judged) for line in lines]
    return []


def write_job(folder: Path, job: TrainingJob, samples: TrainingSamples) -> None:
    (folder / SAMPLES).write_bytes(msgspec.msgpack.encode(samples))
    unfinished = folder / f"{JOB}.unfinished"
    unfinished.write_bytes(msgspec.json.encode(job))
    unfinished.replace(folder / JOB)


class TrainingProcess:
    """It ends with its server, which holds its stdin. Another one goes on with the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self.is_paused = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def reports(self) -> AsyncGenerator[TrainingReport]:
        """Raises TrainingFailed."""
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mlx_server.worker.trainer", str(self._folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=process_environment(),
            start_new_session=True,
        )
        if self.is_paused:
            self.pause()
        assert process.stdout
        assert process.stderr
        errors = asyncio.create_task(process.stderr.read())
        try:
            async for line in process.stdout:
                yield _decoder.decode(line)
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            text = (await errors).decode(errors="replace")
        if process.returncode:
            why = text.strip().rsplit("\n", 1)[-1][-STDERR_BYTES:]
            raise TrainingFailed(f"The training has ended with an error: {why or 'no message'}")

    def pause(self) -> None:
        """After the step that it computes, the process returns the memory of its buffers."""
        self.is_paused = True
        self._send(b"pause\n")

    def go_on(self) -> None:
        self.is_paused = False
        self._send(b"go on\n")

    def _send(self, line: bytes) -> None:
        if self._process and self._process.stdin and not self._process.stdin.is_closing():
            with suppress(ConnectionError):
                self._process.stdin.write(line)
