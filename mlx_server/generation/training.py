"""Trains an adapter with conversations, and publishes it if it is better than its base model.

A sample has the tokens that the model is shown when it is served: its family renders both. Some
samples are held out, and what an adapter loses on them after each epoch decides which weights are
published, if any are.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from random import Random

import msgspec

from mlx_server.engine.training import (
    ADAPTER_WEIGHTS,
    EVALUATIONS,
    JOB,
    Evaluated,
    Trained,
    TrainingJob,
    TrainingMethod,
    TrainingReport,
    TrainingSample,
    TrainingSamples,
    file_of,
    write_job,
)
from mlx_server.errors import TrainingDataInvalid
from mlx_server.generation.rendering import tokenized
from mlx_server.messages import Conversation
from mlx_server.models.adapter_config import CONFIG
from mlx_server.pool.prepare import PreparedModel

HELD_OUT = 0.1
"""The part of the conversations that is not learnt."""

PUBLIC_WORSE = 1.05
"""How much more an adapter may lose than its base model on public texts."""

CARD = "card.json"

TRAINING = "training"
"""A folder in the data directory."""


def sample_of(prepared: PreparedModel, conversation: Conversation) -> TrainingSample:
    """The last message, the assistant's, is what is learnt. Raises TrainingDataInvalid."""
    messages = conversation.messages
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise TrainingDataInvalid("The last message should be the assistant's, after another one.")
    whole = replace(conversation, add_generation_prompt=False)
    tokens = tokenized(prepared, whole).tokens
    prompt = tokenized(prepared, replace(conversation, messages=messages[:-1])).tokens
    same = _common(tokens, prompt)
    if same == len(tokens):
        raise TrainingDataInvalid("The last message is empty.")
    if len(tokens) > prepared.context_length:
        raise TrainingDataInvalid(
            f"The conversation has {len(tokens)} tokens; the context of {prepared.id} has "
            f"{prepared.context_length}. Shorten it."
        )
    return TrainingSample(tokens, same)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(a), len(b)))


def split(samples: Sequence[TrainingSample], seed: int) -> TrainingSamples:
    """Holds a tenth of the samples out, and at least one. Raises TrainingDataInvalid."""
    if len(samples) < 10:
        raise TrainingDataInvalid(
            f"There are {len(samples)} conversations. At least 10 are needed, and some hundred are "
            "a good start."
        )
    order = list(samples)
    Random(seed).shuffle(order)  # noqa: S311  no secret is made of it
    held_out = round(HELD_OUT * len(order))
    return TrainingSamples(order[held_out:], order[:held_out])


@dataclass
class Training:
    """A job in its folder, and what its process has reported, in all its lives."""

    folder: Path
    job: TrainingJob
    data: str
    """The digest of the samples."""
    step: int = 0
    loss: float | None = None
    evaluated: list[Evaluated] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        folder: Path,
        prepared: PreparedModel,
        samples: TrainingSamples,
        method: TrainingMethod,
        epochs: int,
    ) -> "Training":
        """The same samples, model and method have the same folder, in which a training goes on."""
        batch_size = min(method.batch_size, len(samples.learnt))
        method = msgspec.structs.replace(method, batch_size=batch_size)
        a_epoch = len(samples.learnt) // batch_size
        job = TrainingJob(
            checkpoint=str(prepared.path),
            steps=epochs * a_epoch,
            steps_per_epoch=a_epoch,
            tokens=epochs * sum(len(each.tokens) - each.prompt for each in samples.learnt),
            method=method,
        )
        data = sha256(msgspec.msgpack.encode(samples)).hexdigest()
        known = sha256(msgspec.msgpack.encode([job, data, repr(prepared.stamp)])).hexdigest()
        training = cls(folder / known[:16], job, data)
        if not (training.folder / JOB).is_file():
            write_job(training.folder, job, samples)
        training._read()
        return training

    def _read(self) -> None:
        with suppress(FileNotFoundError):
            for line in (self.folder / EVALUATIONS).read_bytes().splitlines():
                self.take(msgspec.json.decode(line, type=Evaluated))

    def take(self, report: TrainingReport) -> None:
        match report:
            case Trained(step, loss):
                self.step, self.loss = step, loss
            case Evaluated():
                if report.step not in [each.step for each in self.evaluated]:
                    self.evaluated.append(report)

    @property
    def is_done(self) -> bool:
        return bool(self.evaluated) and self.evaluated[-1].step == self.job.steps

    @property
    def base(self) -> Evaluated:
        return self.evaluated[0]

    @property
    def best(self) -> Evaluated:
        return min(self.evaluated[1:], key=lambda each: each.losses.held_out)

    def why_not(self) -> str | None:
        """Why the adapter is not to be published."""
        base, best = self.base.losses, self.best.losses
        if best.held_out >= base.held_out:
            return (
                f"It is not better than its base model: it loses {best.held_out:.3f} a token of "
                f"the samples that were held out, and the base model {base.held_out:.3f}."
            )
        if base.public and best.public and best.public > PUBLIC_WORSE * base.public:
            return (
                f"It has forgotten too much: it loses {best.public:.3f} a token of public texts, "
                f"and the base model {base.public:.3f}."
            )
        return None

    def publish(self, adapters: Path, name: str, base: str) -> Path:
        """Moves the adapter to the folder that is searched for adapters, in one step."""
        method = self.job.method
        config = {
            "model": base,
            "fine_tune_type": method.kind,
            "num_layers": method.layers,
            "lora_parameters": {
                "rank": method.rank,
                "scale": method.scale,
                "dropout": method.dropout,
            },
        }
        card = {
            "data_sha256": self.data,
            "method": msgspec.to_builtins(method),
            "steps": self.best.step,
            "loss": {
                "base": msgspec.to_builtins(self.base.losses),
                "adapter": msgspec.to_builtins(self.best.losses),
            },
        }
        made = adapters / f".{name}.unfinished"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        shutil.copy(self.folder / file_of(self.best.step), made / ADAPTER_WEIGHTS)
        for file, value in ((CONFIG, config), (CARD, card)):
            (made / file).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
        os.replace(made, adapters / name)
        return adapters / name

    def drop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
