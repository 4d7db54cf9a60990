"""Encoders, compared with numpy's computation of one text at a time."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.engine.messages import Embed, Embedded, Pooling
from mlx_server.errors import ModelUnusable
from mlx_server.worker import weights
from mlx_server.worker.encoders import Encoder, encoder_output
from mlx_server.worker.engine import Engine
from mlx_server.worker.rows import PIECE
from tests.drained import drained
from tests.tiny_encoders import (
    BERT,
    ENCODERS,
    LAYERS,
    POSITIONS,
    VOCABULARY,
    hidden_states,
    pooled,
    ranking,
    score,
    tiny_encoder,
)
from tests.worker.engine_runs import ask, drain, failures, load, of, tokens_of, until

TEXTS = [[(7 * at + 3 * length) % VOCABULARY for at in range(length)] for length in (1, 9, 40, 2)]


def computed(folder: Path, command: Embed, piece: int = 10**6) -> tuple[Any, int]:
    """The vectors or scores, and in how many pieces they were computed."""
    model = cast(Encoder, weights.loaded(folder))
    found, pieces = drained(encoder_output(model, command, lambda: piece))
    return np.array(found), len(pieces)


def command(row: int = 0, inputs: Any = TEXTS, **rest: Any) -> Embed:
    return Embed(row, "tiny", inputs, **rest)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("is_padded", [True, False])
def test_scores_of_pairs(tmp_path: Path, kind: str, is_padded: bool) -> None:
    config = ranking(ENCODERS[kind])
    own = tiny_encoder(tmp_path, config)
    texts = TEXTS if is_padded else [TEXTS[2]]
    starts = [len(text) // 2 for text in texts]
    found, _ = computed(tmp_path, command(inputs=texts, scores=True, second_from=starts))
    for logit, text, start in zip(found, texts, starts, strict=True):
        exact = score(config, own, hidden_states(config, own, text, start))
        assert 1 / (1 + np.exp(-logit)) == pytest.approx([exact], abs=2e-5)


def test_names_of_the_first_checkpoints(tmp_path: Path) -> None:
    own = tiny_encoder(tmp_path, BERT)
    file = str(tmp_path / "model.safetensors")
    older: Any = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): array
        for name, array in cast(dict[str, mx.array], mx.load(file)).items()
    }
    mx.save_safetensors(file, {**older, "embeddings.position_ids": mx.arange(POSITIONS)})
    (found,), _ = computed(tmp_path, command(inputs=TEXTS[1:2], pooling="cls"))
    exact = pooled(hidden_states(BERT, own, TEXTS[1]), "cls")
    np.testing.assert_allclose(found / np.linalg.norm(found), exact, atol=2e-5)


def test_a_weight_that_is_missing_fails_the_load(tmp_path: Path) -> None:
    tiny_encoder(tmp_path, {**BERT, "num_hidden_layers": LAYERS + 1})
    with pytest.raises(ModelUnusable, match="lack 16 tensors"):
        weights.loaded(tmp_path)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (ask(1), "no text"),
        (command(1, inputs=[[5] * (POSITIONS + 1)]), "more than 96 tokens"),
        (command(1, logits_of=[5]), "no logits"),
        (command(1, scores=True), "no head"),
        (command(1, second_from=[1]), "each pair"),
        (command(1, inputs=[[VOCABULARY]]), "vocabulary"),
    ],
)
def test_what_it_can_not_do_fails_that_row(engine: Engine, asked: Any, why: str) -> None:
    assert why in failures(engine.handle(asked))[1]
    assert engine.pause is None
    engine.handle(command(2))
    assert of(Embedded, drain(engine))


@pytest.fixture
def engine(tmp_path: Path, tiny_path: Path) -> Engine:
    tiny_encoder(tmp_path / "encoder", BERT)
    engine = Engine(concurrency=4)
    load(engine, tmp_path / "encoder")
    load(engine, tiny_path, "chat")
    return engine


def test_a_stream_of_another_model_goes_on_between_its_layers(engine: Engine) -> None:
    stream = ask(1, tokens=200)
    stream.model = "chat"
    engine.handle(stream)
    until(engine, lambda reports: bool(tokens_of(1, reports)))
    long = [TEXTS[2]] * (2 * LAYERS * PIECE // 40)
    engine.handle(command(2, inputs=long))
    reports = until(engine, lambda reports: bool(of(Embedded, reports)))
    assert len(tokens_of(1, reports)) >= LAYERS - 1


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_each_text_is_what_it_is_alone(tmp_path: Path, kind: str, pooling: Pooling) -> None:
    """Next to longer and shorter ones, on both sides of the window."""
    own = tiny_encoder(tmp_path, ENCODERS[kind])
    found, _ = computed(tmp_path, command(pooling=pooling))
    for vector, text in zip(found, TEXTS, strict=True):
        exact = pooled(hidden_states(ENCODERS[kind], own, text), pooling)
        np.testing.assert_allclose(vector / np.linalg.norm(vector), exact, atol=2e-5)


@pytest.mark.parametrize(("piece", "pieces"), [(1, LAYERS), (4 * 40 * 2 // 3 + 1, 2), (10**6, 1)])
def test_a_piece_is_so_many_layers_as_have_its_work(
    tmp_path: Path, piece: int, pieces: int
) -> None:
    tiny_encoder(tmp_path, BERT)
    assert computed(tmp_path, command(), piece)[1] == pieces
