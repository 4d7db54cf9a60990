"""An adapter's files are read in both formats, or refused with the reason."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_unflatten

from mlx_server.engine.messages import CommandFailed
from mlx_server.models.adapter_catalog import read_base_shapes
from mlx_server.models.adapter_reader import read_adapter
from tests.worker.batch_runs import a_prompt
from tests.worker.kinds import CONFIGS, Kind
from tests.worker.lora.desk import Desk, Reference, RowRequest, assert_same
from tests.worker.lora_files import contents, mlx_adapter, peft_adapter, save, weights_of

Formats = Callable[[Path, Path], Path]
FORMATS: dict[str, Formats] = {
    "plain": lambda folder, adapter: peft_adapter(folder, adapter),
    "rslora": lambda folder, adapter: peft_adapter(folder, adapter, rslora=True),
    "patterns": lambda folder, adapter: peft_adapter(folder, adapter, wide="self_attn.q_proj"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dora"), [*((form, False) for form in FORMATS), ("plain", True)])
def test_both_formats_of_an_adapter_agree(
    tiny_path: Path, tmp_path: Path, form: str, dora: bool
) -> None:
    ours = mlx_adapter(tmp_path / "mlx", tiny_path, dora=dora)
    theirs = FORMATS[form](tmp_path / "peft", ours)
    prompts = [a_prompt(30, seed=n) for n in range(3)]
    row_requests = [
        RowRequest(prompt, adapter) for prompt in prompts for adapter in ("ours", "theirs")
    ]
    desk = Desk(tiny_path).loaded(ours=ours, theirs=theirs)
    reference = Reference(tiny_path, ours)
    for row_request, answer in zip(row_requests, desk.all_of(row_requests), strict=True):
        assert_same(answer, reference.answer(row_request.prompt))


NAMES = (
    "base_model.model.model.layers.",
    "base_model.model.model.language_model.layers.",
    "base_model.model.language_model.model.layers.",
    "base_model.model.model.language_model.model.layers.",
    "base_model.model.language_model.layers.",
    "base_model.model.layers.",
    "model.language_model.layers.",
    "base_model.model._orig_mod.model.layers.",
    "module.base_model.model._fsdp_wrapped_module.model.layers.",
)
"""What stands before a layer's number where transformers' classes, old and new, name it."""

WITHIN = ("self_attn.v_proj", "mlp.down_proj")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "gemma3"])
def test_a_layer_is_found_by_each_of_its_names(
    tiny_path: Path, tmp_path: Path, architecture: str
) -> None:
    """Text models and wrapped ones alike: mlx-lm's own reading of the same tensors says what
    comes out."""
    kind = Kind(architecture, CONFIGS[architecture])
    base = tiny_path if architecture == "llama" else kind.save(tmp_path / "base")
    ours = mlx_adapter(tmp_path / "mlx", base, keys=WITHIN)
    made = peft_adapter(tmp_path / "made", ours)
    config = json.loads((made / "adapter_config.json").read_text())
    tensors: Any = mx.load(str(weights_of(made, peft=True)))
    adapters = {
        f"a{i}": save(
            tmp_path / f"a{i}",
            config,
            {
                re.sub(r".*?layers\.", name, key, count=1).replace(".weight", end): tensors[key]
                for key in tensors
            },
            peft=True,
        )
        for i, name in enumerate(NAMES)
        for end in [f".mine_{i}.weight" if i % 2 else ".weight"]  # the training's own name
    }
    prompt = a_prompt(20)
    desk = Desk(base).loaded(**adapters)
    expected = Reference(base, ours).answer(prompt)
    assert expected != Reference(base, None).answer(prompt)
    for answer in desk.all_of([RowRequest(prompt, name) for name in adapters]):
        assert_same(answer, expected)


def test_a_config_of_both_formats_is_of_the_weights_that_are_there(
    tiny_path: Path, tmp_path: Path
) -> None:
    ours = mlx_adapter(tmp_path / "mlx", tiny_path, keys=WITHIN)
    config, tensors = contents(ours)
    both = {**config, "peft_type": "LORA", "base_model_name_or_path": ""}
    renamed = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    adapter = save(tmp_path / "both", both, renamed)
    spec = read_adapter(adapter, base_shapes=None)
    assert (spec.format, spec.rank, spec.base) == ("mlx", 4, None)
    (answer,) = Desk(tiny_path).loaded(both=adapter).all_of([RowRequest(a_prompt(20), "both")])
    assert_same(answer, Reference(tiny_path, ours).answer(a_prompt(20)))


Q = "model.layers.0.self_attn.q_proj"
QKV = "model.layers.0.self_attn.qkv_proj"
GATE_UP = "model.layers.0.mlp.gate_up_proj"
EXPERT = "model.layers.0.mlp.experts.3.gate_proj"
Spoil = Callable[[dict[str, Any], dict[str, mx.array]], Any]


def changed(name: str, change: Callable[[mx.array], mx.array]) -> Spoil:
    def spoil(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        tensors[name] = change(tensors[name])

    return spoil


def poisoned(value: float) -> Spoil:
    return changed(f"{Q}.lora_b", lambda b: mx.where(mx.arange(b.shape[1]) == 3, value, b))


def renamed(to: str) -> Spoil:
    def spoil(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        for leaf in ("lora_a", "lora_b"):
            tensors[f"{to}.{leaf}"] = tensors.pop(f"{Q}.{leaf}")

    return spoil


def doubled(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    for leaf in ("lora_a", "lora_b"):
        tensors[f"{Q}.{leaf}".removeprefix("model.")] = tensors[f"{Q}.{leaf}"]


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "one layer twice": (doubled, "are the same layer"),
    "no such layer": (renamed("model.layers.9.self_attn.q_proj"), "model.layers.9"),
    "fused attention": (renamed(QKV), "no such layer next to k_proj, o_proj, q_proj, v_proj"),
    "fused gate": (renamed(GATE_UP), f"{GATE_UP}: the model has no such layer"),
    "an expert": (renamed(EXPERT), f"{EXPERT}: the model has no such layer"),
    "a norm": (renamed("model.norm"), "model.norm"),
    "a block": (renamed("model.layers.0"), "model.layers.0: a TransformerBlock"),
    "wrong width": (changed(f"{Q}.lora_a", lambda a: a[:-1]), Q),
    "wrong height": (changed(f"{Q}.lora_b", lambda b: b[:, :-1]), Q),
    "other ranks": (changed(f"{Q}.lora_a", lambda a: a[:, :-1]), Q),
    "three dimensions": (changed(f"{Q}.lora_a", lambda a: a[None]), Q),
    "not a number": (poisoned(float("nan")), f"{Q}: some values are not finite"),
    "infinite": (poisoned(float("inf")), f"{Q}: some values are not finite"),
}


@pytest.fixture(scope="module")
def tiny(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Desk, Path]:
    """An engine that no adapter has changed, and one that it would take."""
    return Desk(tiny_path), mlx_adapter(tmp_path_factory.mktemp("good"), tiny_path)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_with_an_adapter_is_said_and_changes_nothing(
    tiny: tuple[Desk, Path], tmp_path: Path, name: str
) -> None:
    desk, good = tiny
    spoil, said = HOSTILE[name]
    config, tensors = contents(good)
    spoil(config, tensors)
    row = desk.ask(RowRequest(a_prompt(9)))
    desk.step()
    types = {name: type(module) for name, module in desk.model.named_modules()}
    failed = desk.load_adapter("bad", save(tmp_path / "bad", config, tensors))
    assert isinstance(failed, CommandFailed)
    assert said in failed.message
    assert {name: type(module) for name, module in desk.model.named_modules()} == types
    desk.finish()
    assert desk.all_of([RowRequest(a_prompt(9))]) == [desk.answers[row]]


def test_layers_of_which_there_are_too_many_are_not_given_to_the_models_code(
    tiny: tuple[Desk, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, good = tiny
    config, tensors = contents(good)
    pair = [(leaf, tensors[f"{Q}.{leaf}"][:1, :1]) for leaf in ("lora_a", "lora_b")]
    calls = list[object]()

    def sanitize(_: object, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        calls.append(weights)
        return weights

    monkeypatch.setattr(type(desk.model), "sanitize", sanitize)
    for layers in (1, 4 * len(desk.model.modules())):
        foreign = {f"x{i}.layers.0.q.{leaf}": part for i in range(layers) for leaf, part in pair}
        adapter = save(tmp_path / str(layers), config, {**tensors, **foreign})
        failed = desk.load_adapter("bad", adapter)
        assert isinstance(failed, CommandFailed)
        assert "no such layer" in failed.message
    assert len(calls) == 1


QWEN = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NEMOTRON = {"fc1": "up_proj", "fc2": "down_proj"}

MODELS: dict[str, tuple[str, Mapping[str, str]]] = {
    "qwen3_moe": ("mlp.switch_mlp", QWEN),
    "mixtral": ("block_sparse_moe.switch_mlp", MIXTRAL),
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


@pytest.mark.slow
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
    of_prompt = iter(desk.all_of(rows))
    changed = False
    for prompt in prompts:
        expected, without = reference.answer(prompt), plain.answer(prompt)
        assert_same(next(of_prompt), expected)
        assert_same(next(of_prompt), without)
        changed |= [token.id for token in expected] != [token.id for token in without]
    assert changed


PLACE = "base_model.model.model.layers.0.mlp.experts."

SpoilExperts = Callable[[dict[str, Any], Tensors], Any]


def without(expert: int) -> SpoilExperts:
    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        for part in "AB":
            del tensors[f"{PLACE}{expert}.up_proj.lora_{part}.weight"]

    return spoil


def named(expert: str, *, keep: bool) -> SpoilExperts:
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


def narrower(config: dict[str, Any], tensors: Tensors) -> None:
    name = f"{PLACE}1.up_proj.lora_A.weight"
    tensors[name] = tensors[name][:, :-1]


def dora(config: dict[str, Any], tensors: Tensors) -> None:
    config["use_dora"] = True
    for name in [name for name in tensors if ".lora_B." in name]:
        magnitude = re.sub("lora_B.*", "lora_magnitude_vector", name)
        tensors[magnitude] = mx.ones(len(tensors[name]))


HOSTILE_EXPERTS: dict[str, tuple[SpoilExperts, str]] = {
    "the first is missing": (without(0), "expert 0 is missing"),
    "one is missing": (without(2), "experts.0.up_proj: the same layer of expert 2 is missing"),
    "the last is missing": (without(3), "experts.0.up_proj: (3, "),
    "one too many": (named("4.up_proj", keep=True), "experts.0.up_proj: (5, "),
    "one far off": (named("9999.up_proj", keep=False), "expert 1 is missing"),
    "a number too large": (named("99999.up_proj", keep=True), "experts.99999.up_proj: the model"),
    "a number of two spellings": (named("01.up_proj", keep=True), "experts.01.up_proj: the model"),
    "a linear of two names": (named("1.w3", keep=True), "are the same layer"),
    "a linear that is none": (named("1.gate_up_proj", keep=True), "1.gate_up_proj: the model"),
    "another width": (narrower, "experts.1.up_proj: its shape is not that of"),
    "DoRA": (dora, "experts.0.up_proj: DoRA is supported for linear layers only"),
}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Desk, Path]:
    folder = tmp_path_factory.mktemp("experts")
    base = Kind("qwen3_moe", CONFIGS["qwen3_moe"]).save(folder / "base")
    ours = mlx_adapter(folder / "mlx", base, keys=["mlp.switch_mlp.up_proj"])
    return Desk(base), of_each_expert(folder / "peft", ours, QWEN)


@pytest.mark.parametrize("name", HOSTILE_EXPERTS)
def test_experts_that_make_no_layer_are_refused_by_name(
    adapted: tuple[Desk, Path], tmp_path: Path, name: str
) -> None:
    desk, good = adapted
    spoil, said = HOSTILE_EXPERTS[name]
    config = json.loads((good / "adapter_config.json").read_text())
    tensors: Any = mx.load(str(weights_of(good, peft=True)))
    spoil(config, tensors)
    failed = desk.load_adapter("bad", save(tmp_path / "bad", config, tensors, peft=True))
    assert isinstance(failed, CommandFailed)
    assert said in failed.message


@pytest.mark.parametrize("change", ["rank", "scale", "both"])
def test_experts_of_unequal_rank_and_scale_add_what_peft_adds(
    adapted: tuple[Desk, Path], tmp_path: Path, change: str
) -> None:
    """The same products, in PEFT's arithmetic: `B @ A * alpha / rank` of each expert."""
    desk, good = adapted
    config = json.loads((good / "adapter_config.json").read_text())
    equal: Any = mx.load(str(weights_of(good, peft=True)))
    unequal, alpha = dict(equal), config["lora_alpha"]
    if change != "scale":
        wider(config, unequal)
        config["alpha_pattern"] = {"layers.0.mlp.experts.1.up_proj": alpha * 5 / 4}
    if change != "rank":
        config.setdefault("alpha_pattern", {})["layers.0.mlp.experts.2.up_proj"] = alpha * 3
        name = f"{PLACE}2.up_proj.lora_B.weight"
        unequal[name] = unequal[name] / 3
    theirs = save(tmp_path / "unequal", config, unequal, peft=True)
    base, prompt = good.parent / "base", a_prompt(40)
    shapes = read_base_shapes(base, "base")
    assert read_adapter(theirs, base_shapes=shapes.shapes, complete=shapes.complete)
    (answer,) = desk.loaded(**{change: theirs}).all_of([RowRequest(prompt, change)])
    expected = merged(base, good.parent / "mlx").answer(prompt)
    assert_same(answer, expected)
    assert expected != Reference(base, None).answer(prompt)


def test_layers_that_both_have_fused_are_adapted_so(tmp_path: Path) -> None:
    base = Kind("phi3", CONFIGS["phi3"]).save(tmp_path / "base")
    fused = ("self_attn.qkv_proj", "mlp.gate_up_proj")
    ours = mlx_adapter(tmp_path / "mlx", base, keys=fused)
    theirs = peft_adapter(tmp_path / "peft", ours)
    (answer,) = Desk(base).loaded(theirs=theirs).all_of([RowRequest(a_prompt(20), "theirs")])
    assert_same(answer, merged(base, ours).answer(a_prompt(20)))


REARRANGED: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]]]] = {
    "hunyuan": (
        CONFIGS["hunyuan"],
        {"self_attn.qkv_proj": (128, 64), "mlp.shared_mlp.gate_and_up_proj": (256, 64)},
    ),
    "granitemoehybrid": (
        {**CONFIGS["granitemoehybrid"], "num_local_experts": None},
        {"shared_mlp.input_linear": (256, 64), "shared_mlp.output_linear": (64, 128)},
    ),
    "kimi_k3": (CONFIGS["kimi_k3"], {f"self_attn.{each}_proj": (128, 64) for each in "qkv"}),
}
"""Models that have layers of transformers in parts, or several as one: those of the first block."""


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", REARRANGED)
def test_layers_that_a_model_has_in_parts_or_joined_are_adapted_as_its_weights_are(
    tmp_path: Path, name: str, dora: bool
) -> None:
    """mlx-lm's own reading of what the adapter adds to the checkpoint's weights says what comes
    out."""
    config, layers = REARRANGED[name]
    base = Kind(name, config).save(tmp_path / "base")
    plain, reference = Reference(base, None), Reference(base, None)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": dora}
    tensors: Tensors = {}
    added, magnitudes = ({"model.layers.0.mlp.gate_and_up_proj.weight": mx.zeros((2, 1))},) * 2
    for layer, shape in layers.items():
        height, width = shape
        a, b = mx.random.normal((4, width)) * 0.1, mx.random.normal((height, 4)) * 0.3
        magnitude = 1 + mx.random.uniform(shape=(height,))
        place = f"base_model.model.model.layers.0.{layer}.lora_"
        tensors |= {f"{place}A.weight": a, f"{place}B.weight": b}
        tensors |= {f"{place}magnitude_vector": magnitude} if dora else {}
        for block, value in enumerate((b @ a * 2, mx.zeros(shape))):
            added = {**added, f"model.layers.{block}.{layer}.weight": value}
            rows = mx.broadcast_to(magnitude[:, None], shape)
            magnitudes = {**magnitudes, f"model.layers.{block}.{layer}.weight": rows}
    magnitudes = reference.model.sanitize(magnitudes)
    modules = dict(reference.model.named_modules())
    for weight, value in reference.model.sanitize(added).items():
        path = weight.removesuffix(".weight")
        if path in modules and "layers.0." in path:
            changed = modules[path].weight + value
            norm = mx.linalg.norm(changed, axis=1, keepdims=True)
            modules[path].weight = magnitudes[weight] * changed / norm if dora else changed
    theirs = save(tmp_path / "theirs", settings, tensors, peft=True)
    shapes = read_base_shapes(base, "base")
    assert read_adapter(theirs, base_shapes=shapes.shapes, complete=shapes.complete).rank == 4
    prompt = a_prompt(20)
    (answer,) = Desk(base).loaded(theirs=theirs).all_of([RowRequest(prompt, "theirs")])
    assert_same(answer, reference.answer(prompt))
    assert reference.answer(prompt) != plain.answer(prompt)
