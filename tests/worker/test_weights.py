"""Weights are read from a folder piece by piece."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.engine.messages import CommandFailed, LoadModel, ModelLoaded, ModelLoading
from mlx_server.models.architectures import module_of
from mlx_server.worker import half_precision, weights
from mlx_server.worker.engine import Engine
from mlx_server.worker.half_precision import OVERFLOWING, may_try_float16
from mlx_server.worker.kernels import Chip
from mlx_server.worker.kv_caches import cache_cost
from mlx_server.worker.prefill.stored_prompt import layout_of
from mlx_server.worker.weights import arrays
from tests.worker.engine_runs import ask, drain, load, of, tokens, tokens_of, until
from tests.worker.kinds import CONFIGS, SIZES, Kind
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
    until(engine, lambda reports: len(tokens_of(0, reports)) > 1)
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


# M1 and M2 compute in float16 what they would emulate in bfloat16, if its values allow it.


DEVICES = {
    "applegpu_g13g": True,  # M1
    "applegpu_g13d": True,  # M1 Ultra
    "applegpu_g14s": True,  # M2 Max
    "applegpu_g15g": False,  # M3
    "applegpu_g16s": False,  # M4 Max
    "applegpu_g17g": False,  # M5
    "sm_90a": False,  # NVIDIA
    "": False,  # a CPU
}


@pytest.mark.parametrize("device", DEVICES)
def test_the_chip_decides(device: str) -> None:
    assert may_try_float16({"model_type": "llama"}, Chip.of(device)) == DEVICES[device]


@pytest.mark.parametrize("name", sorted(OVERFLOWING))
def test_models_that_are_known_to_overflow_are_not_tried(name: str) -> None:
    m1 = Chip(13)
    assert module_of({"model_type": name}), "it is a name of mlx-lm's"
    assert not may_try_float16({"model_type": name}, m1)
    assert not may_try_float16({"model_type": "any", "text_config": {"model_type": name}}, m1)


@pytest.fixture(autouse=True)
def _m1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_precision, "this_chip", lambda: Chip(13))
    monkeypatch.setattr(weights, "has_gpu", lambda: True)  # bfloat16 stays bfloat16


def saved(folder: Path, scaled: dict[str, float], **kind: Any) -> Path:
    """A llama in bfloat16. scaled: factors of tensors whose names have these parts."""
    path = Kind("llama", CONFIGS["llama"], **kind).save(folder)
    file = str(path / "model.safetensors")
    stored: Any = mx.load(file)
    for name, array in stored.items():
        if array.dtype == mx.float32:
            factor = next((f for part, f in scaled.items() if part in name), 1.0)
            stored[name] = (array * factor).astype(mx.bfloat16)
    mx.eval(stored)
    mx.save_safetensors(file, stored, {"format": "mlx"})
    return path


def network_of(folder: Path, **more: Any) -> Any:
    engine = Engine()
    engine.handle(LoadModel("m", str(folder), **more))
    reports = drain(engine)
    assert of(ModelLoaded, reports), of(CommandFailed, reports)
    engine.handle(ask(0, model="m"))
    assert len(tokens(drain(engine))) == 5
    return engine.models.networks["m"]


def halves(network: Any) -> set[mx.Dtype]:
    return {array.dtype for array in arrays(network)} & {mx.bfloat16, mx.float16}


AFFINE = {"group_size": 32, "bits": 4}


@pytest.mark.parametrize("quantized", [None, AFFINE], ids=["dense", "scales and biases"])
def test_all_that_is_not_quantised_computes_in_float16(
    tmp_path: Path,
    quantized: dict[str, Any] | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", None)  # it would stop other models' rows
    caplog.set_level(logging.INFO)
    network = network_of(saved(tmp_path / "m", {}, quantized=quantized))
    assert halves(network) == {mx.float16}
    layout = layout_of(network)
    assert layout, "files of the prompt cache are named after this"
    assert "F16" in layout.describe()
    assert "BF16" not in layout.describe()
    assert "m computes in float16" in caplog.text


OVERFLOWS = {"embed_tokens": 1e6}
UNDERFLOWS = {"embed_tokens": 1e-9}


@pytest.mark.parametrize(
    ("scaled", "why"), [(OVERFLOWS, "leave the range"), (UNDERFLOWS, "next tokens diverge")]
)
def test_a_model_whose_values_do_not_fit_stays_in_bfloat16(
    tmp_path: Path, scaled: dict[str, float], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "m", scaled)
    config = path / "config.json"
    config.write_text(config.read_text().replace("1e-05", "1e-30"))
    network = network_of(path)
    assert halves(network) == {mx.bfloat16}
    exact: Any = mx.load(str(path / "model.safetensors"))
    embedding = exact["model.embed_tokens.weight"]
    assert mx.array_equal(network.model.embed_tokens.weight, embedding), "it is read again"
    (line,) = [record.message for record in caplog.records if "bfloat16" in record.message]
    assert line.startswith("m stays in bfloat16")
    assert why in line


def test_a_model_that_fails_in_float16_stays_in_bfloat16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "m", {})
    (path / "tokenizer.json").write_text("{}")
    assert halves(network_of(path)) == {mx.bfloat16}
    assert "m stays in bfloat16: in float16 it fails" in caplog.text


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_the_setting_decides_alone(
    tmp_path: Path, name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the chip and the values, and what a row takes of memory is that of 16 bits."""
    network = network_of(saved(tmp_path / "m", {}), compute_dtype=name)
    assert halves(network) == {getattr(mx, name)}
    assert "bfloat16" not in caplog.text
    config = {**SIZES, **CONFIGS["llama"]}
    assert 2 * cache_cost(config, compute_dtype=name).per_token == cache_cost(config).per_token
