"""The models in memory: the batch and the adapters of each, and whose step is next.

Models with rows get the same time. Two rules bound how long a row waits for a token, however many
models work: no row waits for a second piece of a prompt, of whichever model, and a row that has
waited for the longest gap goes first.
"""

from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn

from mlx_server.engine.messages import ComputeAhead
from mlx_server.worker.batch import Batch
from mlx_server.worker.lora.adapters import AdapterWeights
from mlx_server.worker.step_result import StepResult
from mlx_server.worker.step_time import StepTime


class LoadedModels:
    def __init__(
        self, make_batch: Callable[[str, nn.Module], Batch], clock: Callable[[], float]
    ) -> None:
        self.batches: dict[str, Batch] = {}
        self.step_time = StepTime(clock)
        self._make_batch = make_batch
        self._clock = clock
        self._adapters: dict[str, AdapterWeights] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a batch can take a step."""
        return any(self.batches.values())

    @property
    def rows(self) -> list[int]:
        """All rows in batches, with paused and preempted ones."""
        return [row for batch in self.batches.values() for row in batch.rows]

    @property
    def networks(self) -> dict[str, nn.Module]:
        return {model: batch.model for model, batch in self.batches.items()}

    def add(self, model: str, network: nn.Module) -> Batch:
        self.batches[model] = self._make_batch(model, network)
        self._adapters[model] = AdapterWeights(network)
        self.step_time.add(model)
        return self.batches[model]

    def remove(self, model: str) -> list[int]:
        """Returns the rows that the model had."""
        batch = self.batches.pop(model, None)
        self._adapters.pop(model, None)
        self.step_time.forget(model)
        return [] if batch is None else batch.rows  # a batch without active rows is falsy

    def drop_rows(self, model: str) -> list[int]:
        """Gives a model a new batch; returns the rows of the old one."""
        rows = self.batches[model].rows
        self.batches[model] = self._make_batch(model, self.batches[model].model)
        return rows

    def next(self) -> str | None:
        """Returns the model that takes the next step."""
        now = self._clock()
        ready = [m for m, batch in self.batches.items() if batch and batch.ready_at <= now]
        late = [model for model in ready if self.batches[model].is_late]
        model = self.step_time.next(late or ready)
        if model is None or not self.batches[model].may_prefill:
            return model
        overdue = [model for model in ready if self.batches[model].is_overdue]
        return self.step_time.next(overdue) or model

    def step(self, model: str) -> StepResult:
        batch = self.batches[model]
        batch.shared = any(b.decoding for b in self.batches.values() if b is not batch)
        with self.step_time.step(model):
            done = batch.step()
        if not done.tokens:  # a piece of a prompt: the rows of all models have waited for it
            for each in self.batches.values():
                each.waited_for_piece = True
        return done

    def has_adapter(self, model: str, adapter: str | None) -> bool:
        """Whether a loaded model has it; all have None."""
        return model in self._adapters and (adapter is None or adapter in self._adapters[model])

    def load_adapter(self, model: str, adapter: str, folder: Path) -> int:
        """Returns its size in bytes."""
        if model not in self._adapters:
            raise ValueError(f"model {model} is not loaded")
        return self._adapters[model].load(adapter, folder)

    def unload_adapter(self, model: str, adapter: str) -> None:
        self._adapters[model].unload(adapter)

    def can_compute(self, command: ComputeAhead) -> bool:
        """Whether its model and adapter are still there, and have all of its tokens."""
        batch = self.batches.get(command.model)
        if batch is None or batch.plays or not self.has_adapter(command.model, command.adapter):
            return False
        return all(0 <= token < batch.vocabulary for token in command.tokens)
