"""Weights are read from a folder piece by piece."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.engine.messages import LoadModel, ModelLoaded, ModelLoading
from mlx_server.worker import weights
from mlx_server.worker.engine import Engine
from tests.worker.architectures import CONFIGS
from tests.worker.engine_runs import ask, load, of, tokens_of, until
from tests.worker.kinds import Kind
from tests.worker.lora_files import network
from tests.worker.one_pass import generated
from tests.worker.served import TOKENS, prompts


def test_a_load_reports_its_bytes_and_then_the_model(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MOST_BYTES", 50_000)
    engine = Engine()
    assert engine.pause is None
    *progress, loaded = load(engine, tiny_path)
    done = [report.done for report in of(ModelLoading, progress)]
    assert len(done) == len(progress) > 4
    assert done == sorted(set(done))
    assert {report.total for report in of(ModelLoading, progress)} == {done[-1]}
    size = (tiny_path / "model.safetensors").stat().st_size
    assert 0.9 * size < done[-1] < size  # the rest of the file is its header
    assert isinstance(loaded, ModelLoaded)
    assert (loaded.model, loaded.vocabulary) == ("tiny", 320)
    assert loaded.nbytes >= done[-1]
    assert engine.pause is None


def test_other_models_decode_while_one_loads(
    engine: Engine, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MOST_BYTES", 50_000)
    engine.handle(ask(0, tokens=1000))
    until(engine, lambda reports: bool(tokens_of(0, reports)))
    engine.handle(LoadModel("second", str(tiny_path)))
    reports = until(engine, lambda reports: bool(of(ModelLoaded, reports)))
    pieces = [at for at, report in enumerate(reports) if isinstance(report, ModelLoading)]
    assert len(pieces) > 4
    assert all(tokens_of(0, reports[one:next]) for one, next in pairwise(pieces))


SEEING = {
    "qwen3_5": "model.visual.patch_embed.proj.weight",
    "qwen3_5_moe": "vision_tower.blocks.0.attn.proj.weight",
    "gemma3": "vision_tower.vision_model.post_layernorm.weight",
    "gemma4": "model.vision_tower.encoder.layers.0.mlp.weight",
    "llama4": "vision_model.class_embedding.weight",
    "mistral3": "vision_tower.ln_pre.weight",
}
"""A weight of the part that sees images, as checkpoints name it."""


@pytest.mark.parametrize("name", SEEING)
def test_a_checkpoint_that_can_see_loads_as_one_of_text(name: str, tmp_path: Path) -> None:
    folder = Kind(name, CONFIGS[name]).save(tmp_path / name)
    blind = generated(network(folder), prompts()[1], TOKENS)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    weights[SEEING[name]] = mx.ones((8, 8))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    assert generated(network(folder), prompts()[1], TOKENS) == blind
