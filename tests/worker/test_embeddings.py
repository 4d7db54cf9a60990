"""Embeddings, compared with a plain computation of one text at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.engine.messages import (
    CancelRows,
    Embed,
    Embedded,
    Pooling,
    PreemptRows,
    ResumeRows,
    RowFailed,
    StepOutput,
)
from mlx_server.worker.encoders import pooled_texts
from mlx_server.worker.engine import Engine
from mlx_server.worker.rows import PIECE
from tests.drained import drained
from tests.tables import cases
from tests.tiny import tiny_embedder
from tests.worker.batch_runs import a_prompt
from tests.worker.engine_runs import ask, drain, failures, load, of, tokens_of, until
from tests.worker.kinds import CONFIGS, Kind

TEXTS = [a_prompt(length) for length in (1, 7, 30, 2, 64, 129, 300)]


def reference(model: Any, text: list[int], pooling: Pooling, dimensions: int | None) -> Any:
    """The whole text at once, without a cache, in numpy from the hidden states on."""
    hidden = np.array(model.model(mx.array([text]))[0], dtype=np.float64)
    vector = (hidden[-1] if pooling == "last" else hidden.mean(axis=0))[:dimensions]
    return vector / np.linalg.norm(vector)


def vectors_of(found: list[bytes]) -> list[Any]:
    return [np.frombuffer(each, dtype="<f4") for each in found]


def command(row: int = 0, inputs: Any = None, **rest: Any) -> Embed:
    return Embed(row, "tiny", TEXTS if inputs is None else inputs, **rest)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(("dimensions", "piece"), [(None, 1), (5, PIECE), (None, 10**6)])
def test_each_is_what_it_is_alone(
    tiny_model: Any, pooling: Pooling, dimensions: int | None, piece: int
) -> None:
    asked = command(
        pooling=pooling, dimensions=dimensions, inputs=TEXTS[:4] if piece == 1 else TEXTS
    )
    found, _ = drained(pooled_texts(tiny_model, asked, lambda: piece, alone=False))
    for vector, text in zip(vectors_of(found), asked.inputs, strict=True):
        exact = reference(tiny_model, text, pooling, dimensions)
        np.testing.assert_allclose(vector, exact, atol=2e-5)


@pytest.mark.parametrize(
    "kind",
    [
        Kind("gpt_oss", CONFIGS["gpt_oss"]),
        Kind("qwen3", {"model_type": "qwen3", "tie_word_embeddings": True}),
    ],
    ids=lambda kind: kind.name,
)
def test_models_with_windows_and_others(tmp_path: Path, kind: Kind) -> None:
    engine = Engine()
    load(engine, kind.save(tmp_path / kind.name))
    texts = TEXTS[:6]
    engine.handle(command(inputs=texts))
    network = engine.models.batches["tiny"].model
    same(drain(engine), [reference(network, text, "last", None) for text in texts])


def test_weights_that_were_saved_without_a_head(tmp_path: Path, tiny_model: Any) -> None:
    """As those of e5-mistral: `MistralModel`, whose names have no prefix."""
    folder = tiny_embedder(tmp_path / "bare")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    whole: Any = mx.load(str(folder / "model.safetensors"))
    bare = {k.removeprefix("model."): v for k, v in whole.items() if k != "lm_head.weight"}
    mx.save_safetensors(str(folder / "model.safetensors"), bare)
    engine = Engine()
    load(engine, folder)
    engine.handle(command())
    same(drain(engine), [reference(tiny_model, text, "last", None) for text in TEXTS])


@pytest.fixture(scope="module")
def exact(tiny_model: Any) -> list[Any]:
    return [reference(tiny_model, text, "last", None) for text in TEXTS]


def same(reports: list[Any], exact: list[Any]) -> None:
    (found,) = of(Embedded, reports)
    np.testing.assert_allclose(vectors_of(found.vectors), exact, atol=2e-5)


def test_a_stream_gets_a_token_after_each_piece(engine: Engine, exact: list[Any]) -> None:
    engine.handle(ask(1, tokens=400))
    until(engine, lambda reports: bool(tokens_of(1, reports)))
    engine.handle(command(2))
    reports = until(engine, lambda reports: bool(of(Embedded, reports)))
    same(reports, exact)
    pieces = -(-300 // (PIECE // len(TEXTS)))
    assert len(tokens_of(1, reports)) >= pieces - 1


def test_clients_take_turns(engine: Engine) -> None:
    """One text of another client waits for one piece, and not for all of the first client's."""
    for row in range(4):
        engine.handle(command(row, client="many"))
    engine.handle(command(9, inputs=[a_prompt(5)], client="one"))
    reports = drain(engine)
    assert [each.row for each in of(Embedded, reports)][:2].count(9) == 1


def test_cancelled_they_are_gone(engine: Engine) -> None:
    engine.handle(command(1))
    engine.step()
    (output,) = engine.handle(CancelRows([1]))
    assert isinstance(output, StepOutput)
    assert output.waiting == 0
    assert engine.pause is None


def test_preempted_they_begin_again(engine: Engine, exact: list[Any]) -> None:
    engine.handle(command(1))
    engine.step()
    engine.handle(PreemptRows([1]))
    assert engine.pause is None, "nothing is to be done meanwhile"
    engine.handle(ResumeRows([1]))
    same(drain(engine), exact)


@cases
def test_what_could_read_other_memory_is_refused(engine: Engine, wrong: dict[str, Any]) -> None:
    assert failures(engine.handle(command(1, **wrong)))
    assert engine.pause is None


def test_damaged_weights_fail_their_request_and_no_other(tiny_path: Path, exact: list[Any]) -> None:
    engine = Engine(concurrency=4)
    load(engine, tiny_path)
    load(engine, tiny_path, "damaged")
    norm = engine.models.batches["damaged"].model.model.norm
    norm.weight = mx.full(norm.weight.shape, float("nan"))
    damaged = command(1)
    damaged.model = "damaged"
    engine.handle(damaged)
    engine.handle(command(2))
    reports = drain(engine)
    (failed,) = of(RowFailed, reports)
    assert (failed.row, "not numbers" in failed.message) == (1, True)
    same(reports, exact)


@pytest.mark.parametrize("deterministic", [False, True])
def test_pieces_are_the_same_next_to_an_answer_if_bits_are_to_be(
    engine: Engine, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    def recorded(model: Any, command: Embed, piece: Callable[[], int], *, alone: bool) -> Any:
        sizes.append(piece())
        return pooled_texts(model, command, piece, alone=alone)

    monkeypatch.setattr("mlx_server.worker.rows.pooled_texts", recorded)
    asked = command(1, deterministic=deterministic)
    engine.handle(asked)
    drain(engine)
    engine.handle(ask(2, tokens=50))
    engine.step()
    engine.handle(asked)
    drain(engine)
    alone, in_company = sizes
    assert (alone == in_company) is deterministic
