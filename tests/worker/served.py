"""A model of each architecture in an engine, and what mlx-lm answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from mlx_server.engine.messages import LimitCache
from tests.worker.kinds import Kind
from tests.worker.newer_architectures import WINDOW
from tests.worker.test_kinds import Bench

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
        self.expected = [generated(self.model, prompt) for prompt in self.prompts]
        self.remember(nothing=True)

    @property
    def model(self) -> Any:
        return self.bench.engine._batches["m"].model

    def remember(self, *, nothing: bool) -> None:
        self.bench.engine.handle(LimitCache(0 if nothing else CACHE_BYTES))

    def together(self, count: int = 4) -> list[list[int]]:
        rows = [self.bench.begin(prompt, TOKENS) for prompt in self.prompts[:count]]
        answers = self.bench.finish()
        return [answers[row] for row in rows]


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, n).tolist() for n in lengths]


def generated(model: Any, prompt: list[int], step: int = 2048) -> list[int]:
    """step: the most tokens of the prompt that are computed at a time."""
    steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS, prefill_step_size=step)
    return [int(token) for token, _ in steps]
