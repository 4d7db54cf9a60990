"""Rows on their way into a batch.

A row waits for its constraint, and for what the disk has of its prompt. Then the log probabilities
of its prompt are computed, if they are requested, and it joins the batch of its model. Embeddings
are computed in the same turns, piece by piece, and join no batch.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mlx_server.engine.messages import (
    Admitted,
    Embed,
    Embedded,
    Generate,
    Logprobs,
    PromptLogprobs,
    Report,
)
from mlx_server.worker.batch import Batch
from mlx_server.worker.constrained_decoding.logit_constraints import (
    LogitConstraint,
    LogitConstraints,
)
from mlx_server.worker.embeddings import IDLE_PIECE, PooledTexts, pooled_texts
from mlx_server.worker.prefill.disk_tier import DiskTier
from mlx_server.worker.prompt_logprobs import PIECE, Scoring, prompt_logprobs
from mlx_server.worker.row import row_adapter_of
from mlx_server.worker.row_cache import key_of
from mlx_server.worker.step_time import StepTime

T = TypeVar("T")


@dataclass
class _ScoredRow:
    command: Generate
    constraint: LogitConstraint | None
    scoring: Scoring


@dataclass
class _EmbeddedRow:
    command: Embed
    pooling: PooledTexts


class RowAdmission:
    def __init__(
        self,
        constraints: LogitConstraints,
        disk: DiskTier,
        batches: Mapping[str, Batch],
        step_time: StepTime,
    ) -> None:
        """batches: those of all models in memory, which the caller changes."""
        self._constraints = constraints
        self._disk = disk
        self._batches = batches
        self._step_time = step_time
        self.waiting: dict[int, Generate] = {}
        """Rows that wait for their constraints, or for what the disk has of their prompts."""
        self._scored: dict[int, _ScoredRow | _EmbeddedRow] = {}
        """Rows whose prompt log probabilities or embeddings are being computed, in the order of
        their turns."""
        self.preempted: set[int] = set()
        """Rows that are to be preempted as soon as they join a batch, and embeddings that wait."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self._scored)

    def __contains__(self, row: int) -> bool:
        return row in self.waiting or row in self._scored

    @property
    def commands(self) -> list[Generate | Embed]:
        return [*self.waiting.values(), *(scored.command for scored in self._scored.values())]

    @property
    def next_scored(self) -> Generate | Embed | None:
        """The row whose prompt log probabilities or embeddings are computed next."""
        return next((each.command for each in self._scored.values() if self._has_turn(each)), None)

    def _has_turn(self, scored: _ScoredRow | _EmbeddedRow) -> bool:
        return isinstance(scored, _ScoredRow) or scored.command.row not in self.preempted

    @property
    def doing(self) -> str:
        """The work that the first waiting row waits for."""
        first = next(iter(self.waiting.values()))
        if self._disk.is_reading(first.row):
            return f"reading a prompt of {first.model} from disk"
        return self._constraints.doing(first.model)

    def add(self, command: Generate) -> list[Report]:
        if not command.prompt_logprobs:
            self._disk.begin(command.row, key_of(command), command.prompt[:-1])
        self.waiting[command.row] = command
        return self.admit(command)

    def admit(self, command: Generate) -> list[Report]:
        """Admits a row that waits, once it has what it waits for."""
        if self._disk.is_reading(command.row):
            return []
        constraint = None
        if command.grammar is not None or command.thinking is not None:
            constraint = self._constraints.constraint(command)
            if constraint is None:
                return []
        del self.waiting[command.row]
        if command.prompt_logprobs:
            self._score(command, constraint)
        else:
            self._join(command, constraint)
        return [Admitted(command.row)]

    def _score(self, command: Generate, constraint: LogitConstraint | None) -> None:
        top = max(command.sampling.logprobs or 0, command.prompt_top_logprobs)
        network = self._batches[command.model].model
        scoring = prompt_logprobs(network, command.prompt, top, row_adapter_of(command))
        self._scored[command.row] = _ScoredRow(command, constraint, scoring)

    def embed(self, command: Embed) -> None:
        self._scored[command.row] = _EmbeddedRow(command, self._pooling(command))

    def _pooling(self, command: Embed) -> PooledTexts:
        batch = self._batches[command.model]
        return pooled_texts(batch.model, command, self._piece_tokens, alone=bool(batch.why_alone))

    def _piece_tokens(self) -> int:
        return PIECE if any(self._batches.values()) else IDLE_PIECE

    def preempt(self, row: int) -> None:
        """Embeddings lose what has been computed of them: they begin again when it is resumed."""
        self.preempted.add(row)
        if isinstance(scored := self._scored.get(row), _EmbeddedRow):
            scored.pooling = self._pooling(scored.command)

    def compute_piece(self, row: int) -> list[Report]:
        """Computes the next piece of the row's prompt log probabilities or embeddings. After the
        last piece the row joins its batch, or its vectors are reported."""
        match self._scored[row]:
            case _EmbeddedRow(pooling=pooling):
                found = _next(pooling)
                return [] if found is None else self._embedded(row, found)
            case _ScoredRow(scoring=scoring):
                scores = _next(scoring)
                return [] if scores is None else self._end_scoring(row, *scores)

    def _embedded(self, row: int, vectors: list[bytes]) -> list[Report]:
        del self._scored[row]
        return [Embedded(row, vectors)]

    def _end_scoring(self, row: int, logprobs: list[Logprobs], cache: list[Any]) -> list[Report]:
        scored = self._scored.pop(row)
        assert isinstance(scored, _ScoredRow)
        if scored.command.max_tokens:
            self._join(scored.command, scored.constraint, cache)
        return [PromptLogprobs(row, logprobs)]

    def _join(
        self, command: Generate, constraint: LogitConstraint | None, cache: list[Any] | None = None
    ) -> None:
        """cache: the cache of the row's prompt, if it has been computed."""
        batch = self._batches[command.model]
        if not batch:
            self._step_time.resume(command.model)
        batch.add(command, cache, constraint)
        if command.row in self.preempted:
            self.preempted.remove(command.row)
            batch.preempt(command.row)

    def end_turn(self, client: str) -> None:
        """Moves the client's scored rows to the end, in their order of arrival: clients take turns
        piece by piece."""
        for row in [r for r, scored in self._scored.items() if scored.command.client == client]:
            self._scored[row] = self._scored.pop(row)

    def drop(self, row: int) -> None:
        self.waiting.pop(row, None)
        self._scored.pop(row, None)

    def clear(self) -> None:
        self.waiting.clear()
        self._scored.clear()


def _next(work: Generator[None, None, T]) -> T | None:
    """Computes a piece; returns the result after the last one."""
    try:
        next(work)
    except StopIteration as end:
        found: T = end.value
        return found
    return None
