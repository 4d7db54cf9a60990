"""The time that the steps of each model have taken: models that have rows get the same time."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class StepTime:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        """Seconds of steps that each model has had. A model that was idle is raised to `_served`,
        so that it does not make up for the idle time."""
        self._served = 0.0
        """The most seconds that a model had when it was served."""

    def add(self, model: str) -> None:
        self._seconds[model] = 0.0

    def forget(self, model: str) -> None:
        self._seconds.pop(model, None)

    def resume(self, model: str) -> None:
        """Records that a model that had no rows has one."""
        self._seconds[model] = max(self._seconds[model], self._served)

    def next(self, models: Iterable[str]) -> str | None:
        """Returns the model that has had the least time."""
        return min(models, key=lambda model: self._seconds[model], default=None)

    @contextmanager
    def step(self, model: str) -> Iterator[None]:
        """Counts the time of the block as the model's."""
        self._served = max(self._served, self._seconds[model])
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[model] += self._clock() - began
