"""All rows of the engine: those on their way into a batch, and those in the models' batches."""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server import limits
from mlx_server.engine.messages import (
    Admitted,
    Embed,
    Embedded,
    Generate,
    Logprobs,
    PromptLogprobs,
    Report,
    Thinking,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch
from mlx_server.worker.constrained_decoding.logit_constraints import (
    LogitConstraint,
    LogitConstraints,
)
from mlx_server.worker.encoders import IDLE_PIECE, Encoder, pooled_texts
from mlx_server.worker.forward_pass import NO_ADAPTER, RowAdapter, RowAdapters, using
from mlx_server.worker.kv_caches import make_caches
from mlx_server.worker.loaded_models import LoadedModels
from mlx_server.worker.prompt_store import PromptStore
from mlx_server.worker.row import prompt_key_of, row_adapter_of
from mlx_server.worker.sampling import step_logprobs
from mlx_server.worker.sight import row_pictures

LARGEST_SCALE = 4.0


def check_row(command: Generate, batch: Batch) -> None:
    """Raises ValueError for parameters that could harm other rows."""
    if batch.encodes:
        raise ValueError("an encoder generates no text")
    if not command.prompt:
        raise ValueError("the prompt is empty")
    if command.max_tokens < (0 if command.prompt_logprobs else 1):
        raise ValueError(f"the token limit is {command.max_tokens}, which is too low")
    if command.generated and len(command.generated) >= command.max_tokens:
        raise ValueError("all tokens that the limit allows have been generated")
    if command.forced_tokens is not None and not (command.forced_tokens and batch.plays):
        raise ValueError("forced tokens need a replay model and must not be empty")
    if not 0 <= command.adapter_scale <= LARGEST_SCALE:
        raise ValueError(f"the adapter's scale must be between 0 and {LARGEST_SCALE:g}")
    if not 0 <= command.delay < math.inf:
        raise ValueError("the delay is out of range")
    # MLX does not check indices: an id past the end reads or overwrites other memory.
    ids = [*text_ids(command, batch), *command.generated, *command.grammar_prefix]
    ids += [*command.sampling.logit_bias, *command.prediction]
    if command.thinking:
        _check_thinking(command.thinking)
        ids += command.thinking.end
    grammars = (command.grammar, command.thinking and command.thinking.rest)
    if (
        max(len(grammar.source) if grammar else 0 for grammar in grammars)
        > limits.WHOLE_GRAMMAR_CHARACTERS
    ):
        raise ValueError("the grammar is too long")
    for id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= id < batch.vocabulary:
            raise ValueError(f"token id {id} is outside the vocabulary of {batch.vocabulary}")
    if not _in_range(command.sampling):
        raise ValueError("a sampling parameter is out of range")


def text_ids(command: Generate, batch: Batch) -> list[int]:
    """The prompt's ids without those of its pictures, which are checked."""
    if not command.pictures or not (pictures := row_pictures(batch.model, command)):
        return command.prompt
    if command.prompt_logprobs:
        raise ValueError("a prompt with pictures has no log probabilities")
    begins, ends = [each.at for each in command.pictures], pictures.ends
    if max(ends) == len(command.prompt):  # penalties of the first token would count an id of it
        raise ValueError("no token follows the prompt's last picture")
    spans = zip([0, *ends], [*begins, len(command.prompt)], strict=True)
    return [id for begin, end in spans for id in command.prompt[begin:end]]


def check_texts(command: Embed, batch: Batch) -> None:
    """Raises ValueError for texts that are empty or have token ids outside the vocabulary."""
    if batch.plays:
        raise ValueError("a replay model has no hidden states")
    if not command.inputs or not all(command.inputs):
        raise ValueError("a text has no tokens")
    ids = [*command.logits_of, *(id for text in command.inputs for id in (min(text), max(text)))]
    if not 0 <= min(ids) <= max(ids) < batch.vocabulary:
        raise ValueError(f"a token id is outside the vocabulary of {batch.vocabulary}")
    if batch.encodes and command.logits_of:
        raise ValueError("an encoder has no logits of tokens")
    if isinstance(batch.model, Encoder) and max(map(len, command.inputs)) > batch.model.longest:
        raise ValueError(f"a text has more than {batch.model.longest} tokens")
    if command.scores and not getattr(batch.model, "labels", 0):
        raise ValueError("the model has no head that gives scores")
    if command.second_from and len(command.second_from) != len(command.inputs):
        raise ValueError("each pair needs the place where its second text begins")
    if command.dimensions is not None and command.dimensions < 1:
        raise ValueError("an embedding needs at least one dimension")


def _check_thinking(thinking: Thinking) -> None:
    delimiters = [*thinking.opens, *thinking.closes]
    tokens = (thinking.budget or 0, thinking.answer or 0)
    if min(tokens) < 0 or not 0 < len(thinking.end) <= limits.REASONING_DELIMITER_TOKENS:
        raise ValueError("the thinking budget or the end of reasoning is out of range")
    if len(delimiters) > limits.REASONING_DELIMITERS or not all(
        0 < len(delimiter) <= limits.REASONING_DELIMITER_TOKENS for delimiter in delimiters
    ):
        raise ValueError("the reasoning delimiters are empty, too long or too many")


def _in_range(s: SamplingParams) -> bool:
    penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    return (
        all(map(math.isfinite, (s.temperature, *penalties, *s.logit_bias.values())))
        and s.repetition_penalty > 0
        and s.temperature >= 0
        and s.top_k >= 0
        and s.top_p >= 0
        and 0 <= s.min_p <= 1
        and (s.logprobs or 0) >= 0
    )


PIECE = 128
"""Tokens computed between two steps of the rows that decode."""

Scoring = Generator[list[Logprobs], None, list[Any]]


def prompt_logprobs(
    model: nn.Module, prompt: list[int], top: int, row_adapter: RowAdapter = NO_ADAPTER
) -> Scoring:
    """Yields the log probabilities of the tokens that follow each piece's; returns the cache of all
    tokens but the last."""
    cache = make_caches(model)
    rows = RowAdapters([row_adapter])
    for start in range(0, len(prompt) - 1, PIECE):
        piece = prompt[start : min(start + PIECE, len(prompt) - 1)]
        with using(rows, model):
            logits = model(mx.array([piece]), cache=cache)[0].astype(mx.float32)
        followers = mx.array(prompt[start + 1 : start + 1 + len(piece)])
        reported = step_logprobs(logits, followers, top)
        yield [reported.read(at, top) for at in range(len(piece))]
    return cache


@dataclass
class _ScoredRow:
    command: Generate | Embed
    work: Generator[list[Logprobs] | None, None, list[Report]]
    """Yields the log probabilities of each piece, if they are requested."""


class Rows:
    """As a container, it has those on their way into a batch.

    A row waits for its constraint, and for what the disk has of its prompt. Then the log
    probabilities of its prompt are computed, if they are requested, and it joins the batch of its
    model. Embeddings are computed in the same turns, piece by piece, and join no batch.
    """

    def __init__(
        self, constraints: LogitConstraints, models: LoadedModels, prompts: PromptStore
    ) -> None:
        self._constraints = constraints
        self._models = models
        self._batches = models.batches
        self._prompts = prompts
        self.paused: set[int] = set()
        """Rows that get no tokens for now; the batches share this set."""
        self.waiting: dict[int, Generate] = {}
        """Rows that wait for their constraints, or for what the disk has of their prompts."""
        self._scored: dict[int, _ScoredRow] = {}
        """Rows whose prompt log probabilities or embeddings are being computed, in the order of
        their turns."""
        self._preempted: set[int] = set()
        """Rows that are to be preempted as soon as they join a batch, and embeddings that wait."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self._scored)

    def __contains__(self, row: int) -> bool:
        return row in self.waiting or row in self._scored

    @property
    def _commands(self) -> list[Generate | Embed]:
        return [*self.waiting.values(), *(scored.command for scored in self._scored.values())]

    @property
    def next_scored(self) -> Generate | Embed | None:
        """The row whose prompt log probabilities or embeddings are computed next."""
        ready = (
            scored.command
            for row, scored in self._scored.items()
            if isinstance(scored.command, Generate) or row not in self._preempted
        )
        return min(ready, key=lambda command: command.tier, default=None)

    @property
    def doing(self) -> str:
        """The work that the first waiting row waits for."""
        first = next(iter(self.waiting.values()))
        if self._prompts.disk.restorer.is_reading(first.row):
            return f"reading a prompt of {first.model} from disk"
        return self._constraints.doing(first.model)

    def check(self, command: Generate) -> None:
        """Raises an error if the row can't be generated."""
        check_row(command, self._batches[command.model])
        if not self._models.has_adapter(command.model, command.adapter):
            raise ValueError(f"adapter {command.adapter} is not loaded")

    def add(self, command: Generate) -> list[Report]:
        if not command.prompt_logprobs:
            prompt = command.row, prompt_key_of(command), command.tokens[:-1]
            self._prompts.memory.hold(*prompt)
            self._prompts.disk.restorer.begin(*prompt)
        self.waiting[command.row] = command
        return self.admit(command)

    def admit(self, command: Generate) -> list[Report]:
        """Admits a row that waits, once it has what it waits for."""
        if self._prompts.disk.restorer.is_reading(command.row):
            return []
        constraint = None
        if command.grammar is not None or command.thinking is not None:
            constraint = self._constraints.constraint(command)
            if constraint is None:
                return []
        del self.waiting[command.row]
        if command.prompt_logprobs:
            self._scored[command.row] = _ScoredRow(command, self._scoring(command, constraint))
        else:
            self._join(command, constraint)
        return [Admitted(command.row)]

    def embed(self, command: Embed) -> list[Report]:
        check_texts(command, self._batches[command.model])
        self._scored[command.row] = _ScoredRow(command, self._embedding(command))
        return []

    def _scoring(
        self, command: Generate, constraint: LogitConstraint | None
    ) -> Generator[list[Logprobs], None, list[Report]]:
        network, top = self._batches[command.model].model, command.sampling.logprobs or 0
        cache = yield from prompt_logprobs(network, command.prompt, top, row_adapter_of(command))
        if command.max_tokens:  # else that is all; a deterministic row's pieces are others
            self._join(command, constraint, None if command.deterministic else cache)
        return [PromptLogprobs(command.row, [])] if command.length == 1 else []

    def _embedding(self, command: Embed) -> Generator[None, None, list[Report]]:
        batch = self._batches[command.model]
        piece = (lambda: PIECE) if command.deterministic else self._piece_tokens
        vectors = yield from pooled_texts(batch.model, command, piece, alone=bool(batch.why_alone))
        return [Embedded(command.row, vectors)]

    def _piece_tokens(self) -> int:
        return PIECE if any(self._batches.values()) else IDLE_PIECE

    def compute_piece(self, row: int) -> list[Report]:
        """Computes the next piece of the row's prompt log probabilities or embeddings. After the
        last piece the row joins its batch, or its vectors are reported."""
        try:
            logprobs = next(self._scored[row].work)
        except StopIteration as end:
            del self._scored[row]
            reports: list[Report] = end.value
            return reports
        return [] if logprobs is None else [PromptLogprobs(row, logprobs)]

    def _join(
        self, command: Generate, constraint: LogitConstraint | None, cache: list[Any] | None = None
    ) -> None:
        """cache: the cache of the row's prompt, if it has been computed."""
        batch = self._batches[command.model]
        batch.add(command, cache, constraint)
        if command.row in self._preempted:
            self._preempted.remove(command.row)
            batch.preempt(command.row)

    def end_turn(self, client: str) -> None:
        """Moves the client's scored rows to the end, in their order of arrival: clients take turns
        piece by piece."""
        for row in [r for r, scored in self._scored.items() if scored.command.client == client]:
            self._scored[row] = self._scored.pop(row)

    def cancel(self, rows: list[int]) -> None:
        self.paused.difference_update(rows)
        self._preempted.difference_update(rows)
        for row in rows:
            self.drop(row)
            for batch in self._batches.values():
                batch.cancel(row)

    def preempt(self, rows: list[int]) -> None:
        """Embeddings lose what has been computed of them: they begin again when they are
        resumed."""
        for row in rows:
            self._prompts.memory.release(row)
            if row in self:
                self._preempted.add(row)
            scored = self._scored.get(row)
            if scored and isinstance(scored.command, Embed):
                scored.work = self._embedding(scored.command)
            for batch in self._batches.values():
                batch.preempt(row)

    def resume(self, rows: list[int]) -> None:
        self._preempted.difference_update(rows)
        for row in rows:
            for batch in self._batches.values():
                batch.resume(row)

    def drop(self, row: int) -> None:
        """Drops a row that has not begun."""
        self.waiting.pop(row, None)
        self._scored.pop(row, None)
        self._prompts.memory.release(row)

    def lose(self, model: str, rows: list[int]) -> None:
        """Drops the rows of a model's step that has failed."""
        self._models.drop_rows(model)
        for row in rows:
            self._prompts.memory.release(row)

    def lose_all(self) -> list[int]:
        """Drops the rows of all models, after the GPU has failed; returns them."""
        lost = [command.row for command in self._commands]
        for model in self._batches:
            lost += self._models.drop_rows(model)
        self.waiting.clear()
        self._scored.clear()
        return lost

    def remove(self, model: str) -> list[int]:
        """Removes the model from memory; returns the rows that it had."""
        lost = [command.row for command in self._commands if command.model == model]
        lost += self._models.remove(model)
        for row in lost:
            self.drop(row)
        return lost

    def with_adapter(self, model: str, adapter: str) -> list[int]:
        of_adapter = (c.row for c in self._commands if (c.model, c.adapter) == (model, adapter))
        batched = self._batches[model].all_rows
        return [*of_adapter, *(row.number for row in batched if row.row_adapter[0] == adapter)]
