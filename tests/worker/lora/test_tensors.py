"""An adapter's files are read in both formats, or refused with the reason."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.engine.messages import AdapterFailed
from mlx_server.lora.catalog import read_adapter
from tests.worker.architectures import CONFIGS
from tests.worker.batch_runs import a_prompt
from tests.worker.kinds import Kind
from tests.worker.lora.desk import Desk, Reference, RowRequest, assert_same
from tests.worker.lora_files import contents, mlx_adapter, peft_adapter, save, weights_of

Formats = Callable[[Path, Path], Path]
FORMATS: dict[str, Formats] = {
    "plain": lambda folder, adapter: peft_adapter(folder, adapter),
    "rslora": lambda folder, adapter: peft_adapter(folder, adapter, rslora=True),
    "patterns": lambda folder, adapter: peft_adapter(folder, adapter, wide="self_attn.q_proj"),
}


@pytest.mark.tables
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("form", FORMATS)
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
    for row_request, answer in zip(row_requests, desk.together(row_requests), strict=True):
        assert_same(answer, reference.answer(row_request.prompt))


NAMES = (
    "base_model.model.model.layers.",
    "base_model.model.model.language_model.layers.",
    "base_model.model.language_model.model.layers.",
    "base_model.model.model.language_model.model.layers.",
    "base_model.model.language_model.layers.",
    "base_model.model.layers.",
    "model.language_model.layers.",
)
"""What stands before a layer's number where transformers' classes, old and new, name it."""

WITHIN = ("self_attn.v_proj", "mlp.down_proj")


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "gemma3"])
def test_a_layer_is_found_by_each_of_its_names(
    tiny_path: Path, tmp_path: Path, architecture: str, dora: bool
) -> None:
    """Text models and wrapped ones alike: mlx-lm's own reading of the same tensors says what
    comes out."""
    kind = Kind(architecture, CONFIGS[architecture])
    base = tiny_path if architecture == "llama" else kind.save(tmp_path / "base")
    ours = mlx_adapter(tmp_path / "mlx", base, keys=WITHIN, dora=dora)
    made = peft_adapter(tmp_path / "made", ours)
    config = json.loads((made / "adapter_config.json").read_text())
    tensors: Any = mx.load(str(weights_of(made, peft=True)))
    adapters = {
        f"a{i}": save(
            tmp_path / f"a{i}",
            config,
            {re.sub(r".*?layers\.", name, key, count=1): tensors[key] for key in tensors},
            peft=True,
        )
        for i, name in enumerate(NAMES)
    }
    prompt = a_prompt(20)
    desk = Desk(base).loaded(**adapters)
    expected = Reference(base, ours).answer(prompt)
    assert expected != Reference(base, None).answer(prompt)
    for answer in desk.together([RowRequest(prompt, name) for name in adapters]):
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
    (answer,) = Desk(tiny_path).loaded(both=adapter).together([RowRequest(a_prompt(20), "both")])
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


def ranked(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    tensors[f"{Q}.lora_a"] = mx.zeros((64, 10_000))
    tensors[f"{Q}.lora_b"] = mx.zeros((10_000, 128))


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
    "fused attention": (renamed(QKV), f"{QKV}: the model has no such layer"),
    "fused gate": (renamed(GATE_UP), f"{GATE_UP}: the model has no such layer"),
    "an expert": (renamed(EXPERT), f"{EXPERT}: the model has no such layer"),
    "a norm": (renamed("model.norm"), "model.norm"),
    "a block": (renamed("model.layers.0"), "model.layers.0: a TransformerBlock"),
    "wrong width": (changed(f"{Q}.lora_a", lambda a: a[:-1]), Q),
    "wrong height": (changed(f"{Q}.lora_b", lambda b: b[:, :-1]), Q),
    "other ranks": (changed(f"{Q}.lora_a", lambda a: a[:, :-1]), Q),
    "three dimensions": (changed(f"{Q}.lora_a", lambda a: a[None]), Q),
    "integers": (changed(f"{Q}.lora_a", lambda a: a.astype(mx.int32)), Q),
    "not a number": (poisoned(float("nan")), f"{Q}: some values are not finite"),
    "infinite": (poisoned(float("inf")), f"{Q}: some values are not finite"),
    "rank": (ranked, "rank is 10000"),
    "half a pair": (lambda c, t: t.pop(f"{Q}.lora_b"), f"{Q}: lora_b is missing"),
    "other tensors": (lambda c, t: t.update(x=mx.zeros(3)), "x: not a LoRA tensor"),
    "a magnitude": (lambda c, t: t.update({f"{Q}.m": mx.zeros(128)}), f"{Q}: m is not LoRA"),
    "no magnitude": (lambda c, t: c.update(fine_tune_type="dora"), "m is missing"),
    "nothing": (lambda c, t: t.clear(), "holds no tensor"),
    "full": (lambda c, t: c.update(fine_tune_type="full"), "serve it as a model"),
    "unknown": (lambda c, t: c.update(fine_tune_type="loha"), "loha"),
    "scale": (lambda c, t: c["lora_parameters"].update(scale=float("nan")), "scale is nan"),
    "no scale": (lambda c, t: c["lora_parameters"].pop("scale"), "scale is None"),
    "no parameters": (lambda c, t: c.pop("lora_parameters"), "scale is None"),
    "huge scale": (lambda c, t: c["lora_parameters"].update(scale=1e300), "not finite"),
    "not lora": (lambda c, t: c.update(peft_type="IA3"), "IA3"),
}


@pytest.mark.tables
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_with_an_adapter_is_said_and_changes_nothing(
    tiny_path: Path, tmp_path: Path, name: str
) -> None:
    spoil, said = HOSTILE[name]
    config, tensors = contents(mlx_adapter(tmp_path / "good", tiny_path))
    spoil(config, tensors)
    assert_refused(tiny_path, save(tmp_path / "bad", config, tensors), said)


PEFT_HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({"bias": "all"}, "bias 'all'"),
    "rank": ({"r": 5}, "rank 4"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha is None"),
    "expression": ({"rank_pattern": {"(a+)+b": 4}}, "(a+)+b"),
    "pattern": ({"rank_pattern": [4]}, "rank_pattern is not an object"),
    "experts": ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
    "dora": ({"use_dora": True}, "lora_magnitude_vector is missing"),
}


@pytest.mark.parametrize("name", PEFT_HOSTILE)
def test_what_is_wrong_with_a_peft_adapter_is_said(
    tiny_path: Path, tmp_path: Path, name: str
) -> None:
    fields, said = PEFT_HOSTILE[name]
    good = mlx_adapter(tmp_path / "good", tiny_path)
    assert_refused(tiny_path, peft_adapter(tmp_path / "bad", good, **fields), said)


FILES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda f: weights_of(f).write_bytes(weights_of(f).read_bytes()[:-100]),
    "cut header": lambda f: weights_of(f).write_bytes(weights_of(f).read_bytes()[:100]),
    "huge header": lambda f: weights_of(f).write_bytes(b"\xff" * 8 + b"{}"),
    "pickle": lambda f: weights_of(f).write_bytes(b"\x80\x04N."),
    "no weights": lambda f: weights_of(f).unlink(),
    "no config": lambda f: (f / "adapter_config.json").unlink(),
    "not json": lambda f: (f / "adapter_config.json").write_text("{"),
    "no object": lambda f: (f / "adapter_config.json").write_text("[]"),
    "deep": lambda f: (f / "adapter_config.json").write_text("[" * 100_000),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_can_not_be_read_are_refused(tiny_path: Path, tmp_path: Path, name: str) -> None:
    folder = mlx_adapter(tmp_path / "bad", tiny_path)
    FILES[name](folder)
    assert_refused(tiny_path, folder, "adapter")


def assert_refused(path: Path, folder: Path, said: str) -> None:
    desk = Desk(path)
    row = desk.begin(RowRequest(a_prompt(9)))
    desk.step()
    types = {name: type(module) for name, module in desk.model.named_modules()}
    failed = desk.load("bad", folder)
    assert isinstance(failed, AdapterFailed)
    assert said in failed.message
    assert {name: type(module) for name, module in desk.model.named_modules()} == types
    desk.finish()
    assert_same(desk.answers[row], Reference(path, None).answer(a_prompt(9)))
