"""Trains an adapter with conversations, and publishes it if it is better than its base model.

A sample has the tokens that the model is shown when it is served: its family renders both. Some
samples are held out, and the validation loss after each epoch decides which weights are
published, if any are.
"""

import filecmp
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from random import Random

import msgspec

from mlx_server.engine.training import (
    ADAPTER,
    JOB,
    Evaluated,
    Judged,
    Trained,
    TrainingJob,
    TrainingMethod,
    TrainingReport,
    TrainingSample,
    TrainingSamples,
    kept_reports,
    write_job,
)
from mlx_server.errors import BadRequest, TrainingDataInvalid, TrainingFailed, public_message
from mlx_server.generation.rendering import tokenized
from mlx_server.messages import Conversation
from mlx_server.models.adapter_config import CONFIG
from mlx_server.pool.prepare import REPLAY, ModelSpec, PreparedModel
from mlx_server.prompts.control_token_guard import common_length

HELD_OUT = 0.1
"""The part of the conversations that is not learnt."""

PUBLIC_WORSE = 1.1
"""How much more an adapter may lose than its base model on public texts."""

PUBLIC_TEXTS = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    "nothing to do: once or twice she had peeped into the book her sister was reading, but it had "
    "no pictures or conversations in it.",
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, "
    "conceived in Liberty, and dedicated to the proposition that all men are created equal.",
    "Habe nun, ach! Philosophie, Juristerei und Medizin, und leider auch Theologie durchaus "
    "studiert, mit heißem Bemühn. Da steh ich nun, ich armer Tor, und bin so klug als wie zuvor.",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n\n\nprint(gcd(48, 36))\n",
    "If equals be added to equals, the wholes are equal. 3 + 4 = 7, 7 + 5 = 12, 12 * 12 = 144.",
)
"""In the public domain: Carroll, Lincoln, Goethe, and Euclid."""

CARD = "card.json"

TRAINING = "training"
"""A folder in the data directory."""


def check_trainable(spec: ModelSpec) -> None:
    """Raises BadRequest."""
    if spec.upstream or spec.source.startswith(REPLAY):
        raise BadRequest(
            f"{spec.id} can't be trained: name a model with weights on this machine.", param="model"
        )


def sample_of(prepared: PreparedModel, conversation: Conversation) -> TrainingSample:
    """The last message, the assistant's, is what is learnt. Raises TrainingDataInvalid."""
    messages = conversation.messages
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise TrainingDataInvalid("The last message should be the assistant's, after another one.")
    whole = replace(conversation, add_generation_prompt=False)
    tokens = tokenized(prepared, whole).tokens
    prompt = tokenized(prepared, replace(conversation, messages=messages[:-1])).tokens
    same = common_length(tokens, prompt)
    if same == len(tokens):
        raise TrainingDataInvalid("The last message is empty.")
    if len(tokens) > prepared.context_length:
        raise TrainingDataInvalid(
            f"The conversation has {len(tokens)} tokens; the context of {prepared.id} has "
            f"{prepared.context_length}. Shorten it."
        )
    return TrainingSample(tokens, same)


def public_tokens(prepared: PreparedModel) -> list[Sequence[int]]:
    texts = map(prepared.checkpoint.tokenizer.encode, PUBLIC_TEXTS)
    return [text[: prepared.context_length] for text in texts]


def split(
    prepared: PreparedModel,
    samples: Sequence[TrainingSample],
    held_out: Sequence[TrainingSample],
    seed: int,
) -> TrainingSamples:
    """Holds a tenth of the samples out, and at least one, if no others are. Raises
    TrainingDataInvalid."""
    public = [TrainingSample(tokens, 0) for tokens in public_tokens(prepared)]
    if held_out:
        return TrainingSamples(samples, held_out, public)
    if len(samples) < 10:
        raise TrainingDataInvalid(
            "At least 10 conversations are needed, and some hundred are a good start. "
            f"The data has {len(samples)}."
        )
    order = list(samples)
    Random(seed).shuffle(order)  # noqa: S311  no secret is made of it
    count = round(HELD_OUT * len(order))
    return TrainingSamples(order[count:], order[:count], public)


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
    judged: Judged | None = None

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
            training.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_config(training.folder / ADAPTER, prepared.spec.source, method)
            write_job(training.folder, job, samples)
        for report in kept_reports(training.folder):
            training.take(report)
        return training

    def take(self, report: TrainingReport) -> None:
        match report:
            case Trained(step, loss):
                self.step, self.loss = step, loss
            case Evaluated():
                if report.step not in [each.step for each in self.evaluated]:
                    self.evaluated.append(report)
            case Judged():
                self.judged = report

    def why_not(self) -> str | None:
        """Why the adapter is not to be published."""
        assert self.judged
        base, adapter = self.judged.base, self.judged.adapter
        if adapter.held_out >= base.held_out:
            return (
                "It is not better than its base model: its validation loss is "
                f"{adapter.held_out:.3f}, and the base model's {base.held_out:.3f}."
            )
        if adapter.public > PUBLIC_WORSE * base.public:
            return (
                f"It has forgotten too much: its loss on public texts is {adapter.public:.3f}, and "
                f"the base model's {base.public:.3f}. Fewer epochs, or a lower learning rate, keep "
                "more."
            )
        return None

    def publish(self, adapters: Path, name: str) -> Path:
        """Moves the adapter to the folder that is searched for adapters, in one step. Raises
        TrainingFailed."""
        assert self.judged
        card = {
            "data_sha256": self.data,
            "method": msgspec.to_builtins(self.job.method),
            "steps": self.judged.step,
            "loss": {
                "base": msgspec.to_builtins(self.judged.base),
                "adapter": msgspec.to_builtins(self.judged.adapter),
            },
        }
        made, place = adapters / f".{name}.unfinished", adapters / name
        shutil.rmtree(made, ignore_errors=True)
        try:
            shutil.copytree(self.folder / ADAPTER, made)
            (made / CARD).write_text(json.dumps(card, indent=2) + "\n", "utf-8")
            os.replace(made, place)
        except OSError as error:
            # a process that was killed may have published it without having said so
            new, old = made / CARD, place / CARD
            if not (new.is_file() and old.is_file() and filecmp.cmp(new, old, shallow=False)):
                why = "there is one" if place.exists() else public_message(error)
                raise TrainingFailed(
                    f"The adapter {name!r} can't be published: {why}. Train again, with another "
                    "name or when that is mended."
                ) from None
            shutil.rmtree(made)
        return place

    def drop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _write_config(adapter: Path, base: str, method: TrainingMethod) -> None:
    """base: the source of the model."""
    parameters = {"rank": method.rank, "scale": method.scale, "dropout": method.dropout}
    config = {
        "model": base,
        "fine_tune_type": method.kind,
        "num_layers": method.layers,
        "lora_parameters": parameters,
    }
    adapter.mkdir(exist_ok=True)
    (adapter / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
