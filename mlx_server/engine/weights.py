"""Weights from a checkpoint folder, a piece at a time."""

import json
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_server.engine.replay import ReplayModel

REPLAY = "replay"
"""The model type of checkpoints without weights."""

PIECE_BYTES = 8 << 20
"""Read between two steps of the models that are already running."""


def load(path: Path) -> Generator[tuple[int, int], None, nn.Module]:
    """Yields (bytes read, bytes in all) as it goes; returns the model."""
    config = json.loads((path / "config.json").read_text("utf-8"))
    if config.get("model_type") == REPLAY:
        return ReplayModel(config["vocab_size"])
    model, _ = load_model(path, lazy=True)
    # The weights it began with were never computed, nor were the keys drawn for them: each load
    # would make the chain of those longer.
    mx.random.seed(0)
    if not mx.metal.is_available():
        # MLX's CPU kernels are several times faster in float32 than in either half precision.
        model.set_dtype(mx.float32)
    total = sum(array.nbytes for array in arrays(model))
    done = 0
    yield done, total
    for piece in _pieces(arrays(model)):
        mx.eval(piece)
        done += sum(array.nbytes for array in piece)
        yield done, total
    return model


def arrays(model: nn.Module) -> list[mx.array]:
    return [array for _, array in tree_flatten(model.parameters())]


def _pieces(arrays: Iterable[mx.array]) -> Iterator[list[mx.array]]:
    piece: list[mx.array] = []
    for array in arrays:
        piece.append(array)
        if sum(a.nbytes for a in piece) >= PIECE_BYTES:
            yield piece
            piece = []
    if piece:
        yield piece
