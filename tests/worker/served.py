"""A model of each architecture in an engine, and what mlx-lm answers."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mlx_server.engine.messages import CancelRows, LimitCache
from tests.worker.bench import Bench
from tests.worker.kinds import WINDOW, Kind
from tests.worker.one_pass import expected

TOKENS = 8
CACHE_BYTES = 1 << 30
LENGTHS = (1, WINDOW + 1, 5, 2 * WINDOW + 6)


class Served:
    """One architecture in one engine, and what mlx-lm says of the same prompts."""

    def __init__(self, kind: Kind, folder: Path, lengths: Sequence[int] = LENGTHS) -> None:
        self.name = kind.name
        self.path = kind.save(folder / kind.name)
        self.bench = Bench(self.path, CACHE_BYTES)
        self.prompts = prompts(lengths)
        self.remember(nothing=True)

    @property
    def model(self) -> Any:
        return self.bench.batch.model

    @cached_property
    def expected(self) -> list[list[int]]:
        return self.mlx_lm_answers(self.prompts, self.ragged)

    def mlx_lm_answers(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]], model: Any = None
    ) -> list[list[int]]:
        """answers: what the engine says."""
        pairs = zip(prompts, answers, strict=True)
        return [expected(model or self.model, *pair, TOKENS) for pair in pairs]

    def remember(self, *, nothing: bool) -> None:
        self.bench.handle(LimitCache(0 if nothing else CACHE_BYTES))

    @cached_property
    def ragged(self) -> list[list[int]]:
        """The answers to rows that were computed together, with one more among them that was
        cancelled. They are left in the cache."""
        self.remember(nothing=False)
        first, cancelled, *others = (
            self.bench.begin(prompt, TOKENS)
            for prompt in (self.prompts[0], self.prompts[1][::-1], *self.prompts[1:])
        )
        steps = [self.bench.step() for _ in range(4)]
        self.bench.handle(CancelRows([cancelled]))
        steps.append(self.bench.finish())
        return [[t for step in steps for t in step.get(row, [])] for row in (first, *others)]

    def together(self, count: int = 4) -> list[list[int]]:
        return self.bench.together(self.prompts[:count], TOKENS)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, n).tolist() for n in lengths]
