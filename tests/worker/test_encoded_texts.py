"""Texts that an encoder computes together, some layers at a time."""

from pathlib import Path

import numpy as np
import pytest

from mlx_server.engine.messages import Pooling
from tests.tiny_encoders import BERT, ENCODERS, LAYERS, hidden_states, pooled, tiny_encoder
from tests.worker.encoder_runs import TEXTS, command, computed, loaded


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_each_text_is_what_it_is_alone(tmp_path: Path, kind: str, pooling: Pooling) -> None:
    """Next to longer and shorter ones, on both sides of the window."""
    own = tiny_encoder(tmp_path, ENCODERS[kind])
    found, _ = computed(loaded(tmp_path), command(pooling=pooling))
    for vector, text in zip(found, TEXTS, strict=True):
        exact = pooled(hidden_states(ENCODERS[kind], own, text), pooling)
        np.testing.assert_allclose(vector / np.linalg.norm(vector), exact, atol=2e-5)


@pytest.mark.parametrize(("piece", "pieces"), [(1, LAYERS), (4 * 40 * 2 // 3 + 1, 2), (10**6, 1)])
def test_a_piece_is_so_many_layers_as_have_its_work(
    tmp_path: Path, piece: int, pieces: int
) -> None:
    tiny_encoder(tmp_path, BERT)
    assert computed(loaded(tmp_path), command(), lambda: piece)[1] == pieces
