"""All rows of the engine: those on their way into a batch, and those in the models' batches."""

from mlx_server.engine.messages import Embed, Generate, Report
from mlx_server.worker.loaded_models import LoadedModels
from mlx_server.worker.prefill.prompt_cache import PromptCache
from mlx_server.worker.row_admission import RowAdmission
from mlx_server.worker.row_cache import key_of
from mlx_server.worker.row_validation import check_row, check_texts


class Rows:
    def __init__(self, admission: RowAdmission, models: LoadedModels, cache: PromptCache) -> None:
        self._admission = admission
        self._models = models
        self._cache = cache
        self.paused: set[int] = set()
        """Rows that get no tokens for now; the batches share this set."""

    def check(self, command: Generate) -> None:
        """Raises an error if the row can't be generated."""
        check_row(command, self._models.batches[command.model])
        if not self._models.has_adapter(command.model, command.adapter):
            raise ValueError(f"adapter {command.adapter} is not loaded")

    def add(self, command: Generate) -> list[Report]:
        if not command.prompt_logprobs:
            self._cache.hold(command.row, key_of(command), command.prompt[:-1])
        return self._admission.add(command)

    def embed(self, command: Embed) -> list[Report]:
        check_texts(command, self._models.batches[command.model])
        self._admission.embed(command)
        return []

    def cancel(self, rows: list[int]) -> None:
        self.paused.difference_update(rows)
        self._admission.preempted.difference_update(rows)
        for row in rows:
            self.drop(row)
            for batch in self._models.batches.values():
                batch.cancel(row)

    def preempt(self, rows: list[int]) -> None:
        for row in rows:
            self._cache.release(row)
            if row in self._admission:
                self._admission.preempt(row)
            for batch in self._models.batches.values():
                batch.preempt(row)

    def resume(self, rows: list[int]) -> None:
        self._admission.preempted.difference_update(rows)
        for row in rows:
            for batch in self._models.batches.values():
                batch.resume(row)

    def drop(self, row: int) -> None:
        """Drops a row that has not begun."""
        self._admission.drop(row)
        self._cache.release(row)

    def lose(self, model: str, rows: list[int]) -> None:
        """Drops the rows of a model's step that has failed."""
        self._models.drop_rows(model)
        for row in rows:
            self._cache.release(row)

    def lose_all(self) -> list[int]:
        """Drops the rows of all models, after the GPU has failed; returns them."""
        lost = [command.row for command in self._admission.commands]
        for model in self._models.batches:
            lost += self._models.drop_rows(model)
        self._admission.clear()
        return lost

    def remove(self, model: str) -> list[int]:
        """Removes the model from memory; returns the rows that it had."""
        lost = [command.row for command in self._not_in_batches(model)]
        lost += self._models.remove(model)
        for row in lost:
            self.drop(row)
        return lost

    def with_adapter(self, model: str, adapter: str) -> list[int]:
        waiting = [c.row for c in self._not_in_batches(model) if c.adapter == adapter]
        return waiting + self._models.batches[model].rows_with(adapter)

    def _not_in_batches(self, model: str) -> list[Generate | Embed]:
        return [command for command in self._admission.commands if command.model == model]
