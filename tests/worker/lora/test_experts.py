"""PEFT's adapters name each expert, where mlx-lm's models have one layer of all experts."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_unflatten

from mlx_server.engine.messages import AdapterFailed
from mlx_server.lora.base_model import read_base_shapes
from mlx_server.lora.catalog import read_adapter
from tests.worker.architectures import CONFIGS
from tests.worker.batch_runs import a_prompt
from tests.worker.kinds import Kind
from tests.worker.lora.desk import Desk, Reference, RowRequest, assert_same
from tests.worker.lora_files import contents, mlx_adapter, peft_adapter, save, weights_of

QWEN = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NEMOTRON = {"fc1": "up_proj", "fc2": "down_proj"}

MODELS: dict[str, tuple[str, Mapping[str, str]]] = {
    "qwen3_moe": ("mlp.switch_mlp", QWEN),
    "qwen3_5_moe": ("mlp.switch_mlp", QWEN),
    "deepseek_v3": ("mlp.switch_mlp", QWEN),
    "mixtral": ("block_sparse_moe.switch_mlp", MIXTRAL),
    "lfm2_moe": ("feed_forward.switch_mlp", MIXTRAL),
    "nemotron_h": ("mixer.switch_mlp", NEMOTRON),
    "gpt_oss": ("mlp.experts", QWEN),
}
"""The experts' path in mlx-lm's model, and what transformers calls their linears."""

Tensors = dict[str, mx.array]


def of_each_expert(folder: Path, adapter: Path, names: Mapping[str, str]) -> Path:
    """The adapter in PEFT's format, in which each expert has tensors of its own."""
    config, tensors = contents(adapter)
    made: Tensors = {}
    for name, tensor in tensors.items():
        layer, leaf = name.rsplit(".", 1)
        block, linear = layer.rsplit(".", 1)
        block = block.rpartition(".")[0]
        for number, one in enumerate(tensor):
            expert = f"base_model.model.{block}.experts.{number}.{names[linear]}"
            made[f"{expert}.lora_{leaf[-1].upper()}.weight"] = mx.contiguous(one)
    lora = config["lora_parameters"]
    settings = {"peft_type": "LORA", "r": lora["rank"], "lora_alpha": lora["scale"] * lora["rank"]}
    return save(folder, settings, made, peft=True)


def merged(base: Path, adapter: Path) -> Reference:
    """mlx-lm's model with the adapter in its weights."""
    reference = Reference(base, adapter)
    modules = reference.model.named_modules()
    fused = [(path, each.fuse()) for path, each in modules if hasattr(each, "fuse")]
    reference.model.update_modules(tree_unflatten(fused))
    return reference


@pytest.mark.tables
@pytest.mark.parametrize("model", MODELS)
def test_experts_of_their_own_answer_as_mlx_lm_with_merged_weights(
    tmp_path: Path, model: str
) -> None:
    path, names = MODELS[model]
    base = Kind(model, CONFIGS[model]).save(tmp_path / "base")
    ours = mlx_adapter(tmp_path / "mlx", base, keys=[f"{path}.{name}" for name in names])
    theirs = of_each_expert(tmp_path / "peft", ours, names)
    shapes = read_base_shapes(base, "base")
    assert read_adapter(theirs, base_shapes=shapes.shapes, complete=shapes.complete).rank == 4
    desk = Desk(base).loaded(theirs=theirs)
    prompts = [a_prompt(9), a_prompt(40)]  # mlx-lm sorts the tokens of the long one by expert
    plain, reference = Reference(base, None), merged(base, ours)
    rows = [RowRequest(prompt, name) for prompt in prompts for name in ("theirs", None)]
    of_prompt = iter(desk.together(rows))
    changed = False
    for prompt in prompts:
        expected, without = reference.answer(prompt), plain.answer(prompt)
        assert_same(next(of_prompt), expected)
        assert_same(next(of_prompt), without)
        changed |= [token.id for token in expected] != [token.id for token in without]
    assert changed


PLACE = "base_model.model.model.layers.0.mlp.experts."

Spoil = Callable[[dict[str, Any], Tensors], Any]


def without(expert: int) -> Spoil:
    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        for part in "AB":
            del tensors[f"{PLACE}{expert}.up_proj.lora_{part}.weight"]

    return spoil


def named(expert: str, *, keep: bool) -> Spoil:
    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        for part in "AB":
            leaf = f"lora_{part}.weight"
            tensors[f"{PLACE}{expert}.{leaf}"] = tensors[f"{PLACE}1.up_proj.{leaf}"]
            if not keep:
                del tensors[f"{PLACE}1.up_proj.{leaf}"]

    return spoil


def wider(config: dict[str, Any], tensors: Tensors) -> None:
    config["rank_pattern"] = {"layers.0.mlp.experts.1.up_proj": 5}
    a, b = (f"{PLACE}1.up_proj.lora_{part}.weight" for part in "AB")
    tensors[a], tensors[b] = (
        mx.pad(tensors[a], [(0, 1), (0, 0)]),
        mx.pad(tensors[b], [(0, 0), (0, 1)]),
    )


def dora(config: dict[str, Any], tensors: Tensors) -> None:
    config["use_dora"] = True
    for name in [name for name in tensors if ".lora_B." in name]:
        magnitude = re.sub("lora_B.*", "lora_magnitude_vector", name)
        tensors[magnitude] = mx.ones(len(tensors[name]))


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "the first is missing": (without(0), "expert 0 is missing"),
    "one is missing": (without(2), "experts.0.up_proj: the same layer of expert 2 is missing"),
    "the last is missing": (without(3), "experts.0.up_proj: (3, "),
    "one too many": (named("4.up_proj", keep=True), "experts.0.up_proj: (5, "),
    "one far off": (named("9999.up_proj", keep=False), "expert 1 is missing"),
    "a number too large": (named("99999.up_proj", keep=True), "experts.99999.up_proj: the model"),
    "a number of two spellings": (named("01.up_proj", keep=True), "experts.01.up_proj: the model"),
    "a linear of two names": (named("1.w3", keep=True), "are the same layer"),
    "a linear that is none": (named("1.gate_up_proj", keep=True), "1.gate_up_proj: the model"),
    "another rank": (wider, "experts.1.up_proj: its rank or scale is not that of"),
    "another scale": (
        lambda c, t: c.update(alpha_pattern={"experts.2.up_proj": 3}),
        "experts.2.up_proj: its rank or scale is not that of",
    ),
    "DoRA": (dora, "experts.0.up_proj: DoRA is supported for linear layers only"),
}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Desk, Path]:
    folder = tmp_path_factory.mktemp("experts")
    base = Kind("qwen3_moe", CONFIGS["qwen3_moe"]).save(folder / "base")
    ours = mlx_adapter(folder / "mlx", base, keys=["mlp.switch_mlp.up_proj"])
    return Desk(base), of_each_expert(folder / "peft", ours, QWEN)


@pytest.mark.parametrize("name", HOSTILE)
def test_experts_that_make_no_layer_are_refused_by_name(
    adapted: tuple[Desk, Path], tmp_path: Path, name: str
) -> None:
    desk, good = adapted
    spoil, said = HOSTILE[name]
    config = json.loads((good / "adapter_config.json").read_text())
    tensors: Any = mx.load(str(weights_of(good, peft=True)))
    spoil(config, tensors)
    failed = desk.load("bad", save(tmp_path / "bad", config, tensors, peft=True))
    assert isinstance(failed, AdapterFailed)
    assert said in failed.message


def test_layers_that_both_have_fused_are_adapted_so(tmp_path: Path) -> None:
    base = Kind("phi3", CONFIGS["phi3"]).save(tmp_path / "base")
    fused = ("self_attn.qkv_proj", "mlp.gate_up_proj")
    ours = mlx_adapter(tmp_path / "mlx", base, keys=fused)
    theirs = peft_adapter(tmp_path / "peft", ours)
    (answer,) = Desk(base).loaded(theirs=theirs).together([RowRequest(a_prompt(20), "theirs")])
    assert_same(answer, merged(base, ours).answer(a_prompt(20)))
