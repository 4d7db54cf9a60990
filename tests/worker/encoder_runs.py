"""Runs an engine with a tiny encoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlx_server.engine.messages import Embed
from mlx_server.worker import weights
from mlx_server.worker.encoders import Encoder, encoder_output
from tests.tiny_encoders import VOCABULARY

TEXTS = [[(7 * at + 3 * length) % VOCABULARY for at in range(length)] for length in (1, 9, 40, 2)]


def loaded(folder: Path) -> Encoder:
    reading = weights.load(folder)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return cast(Encoder, end.value)


def computed(
    model: Encoder, command: Embed, piece: Callable[[], int] = lambda: 10**6
) -> tuple[Any, int]:
    """The vectors or scores, and in how many pieces they were computed."""
    work, pieces = encoder_output(model, command, piece), 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return np.array(end.value), pieces
        pieces += 1


def command(row: int = 0, inputs: Any = TEXTS, **rest: Any) -> Embed:
    return Embed(row, "tiny", inputs, **rest)
