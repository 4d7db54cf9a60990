"""Reads an adapter's folder, in mlx-lm's or PEFT's format, as arrays by layer.

The result is not checked against any model, and its weights are not evaluated.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_server.errors import AdapterInvalid, public_message
from mlx_server.lora.config import CONFIG, MLX_WEIGHTS, PEFT_EXTRAS, PEFT_WEIGHTS, format_of
from mlx_server.system.regular_files import read_regular

Leaves = dict[str, mx.array]


@dataclass(frozen=True)
class LoraTensors:
    """An adapter's tensors for one layer."""

    name: str
    """The common part of the tensors' names in the file."""
    a: mx.array
    """[in, rank], for experts [experts, in, rank]."""
    b: mx.array
    """[rank, out], for experts [experts, rank, out]."""
    scale: float
    magnitude: mx.array | None = None
    """[out]; only for DoRA."""
    head: bool = True
    """Whether an embedding's pair also applies where the embedding is the model's output head."""


def read(folder: Path) -> dict[str, LoraTensors]:
    """Returns the tensors by layer path: mlx-lm's own path, or Hugging Face's in PEFT's format."""
    try:
        config = json.loads(read_regular(folder / CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterInvalid(f"{CONFIG} can't be read: {public_message(error)}") from error
    if not isinstance(config, dict):
        raise AdapterInvalid(f"{CONFIG} is not an object")
    return (_read_peft if format_of(folder, config) == "peft" else _read_mlx)(folder, config)


def _read_mlx(folder: Path, config: dict[str, Any]) -> dict[str, LoraTensors]:
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise AdapterInvalid("this is a full fine-tune: serve it as a model instead")
    if kind not in ("lora", "dora"):
        raise AdapterInvalid(f"fine_tune_type {kind!r} is not supported; use lora or dora")
    parameters = config.get("lora_parameters")
    scale = _number(parameters if isinstance(parameters, dict) else {}, "scale")
    pairs = {}
    for layer, leaves in _leaves(folder / MLX_WEIGHTS, _mlx_leaf).items():
        a, b, magnitude = _parts(layer, leaves, ("lora_a", "lora_b", "m"), dora=kind == "dora")
        if a.ndim == 3:
            a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
        pairs[layer] = LoraTensors(layer, a, b, scale, magnitude)
    return pairs


def _mlx_leaf(tensor: str) -> tuple[str, str] | None:
    layer, _, leaf = tensor.rpartition(".")
    return (layer, leaf) if leaf in ("lora_a", "lora_b", "m") else None


def _read_peft(folder: Path, config: dict[str, Any]) -> dict[str, LoraTensors]:
    if config["peft_type"] != "LORA":
        raise AdapterInvalid(f"peft_type {config['peft_type']!r} is not supported; use LORA")
    if extra := next((name for name in PEFT_EXTRAS if config.get(name)), None):
        raise AdapterInvalid(f"PEFT's {extra} is not supported")
    if config.get("bias", "none") != "none":
        raise AdapterInvalid(f"PEFT's bias {config['bias']!r} is not supported; use none")
    pairs = {}
    for layer, leaves in _leaves(folder / PEFT_WEIGHTS, _peft_leaf).items():
        lookup = "lora_embedding_A" in leaves or "lora_embedding_B" in leaves
        kinds = ("lora_embedding_A", "lora_embedding_B") if lookup else ("lora_A", "lora_B")
        names = (*kinds, "lora_magnitude_vector")
        a, b, magnitude = _parts(layer, leaves, names, dora=bool(config.get("use_dora")))
        if a.ndim != 2:
            raise AdapterInvalid(f"{layer}: {names[0]} is not a matrix")
        scale = _peft_scale(config, layer, a.shape[0])
        magnitude = None if magnitude is None else magnitude.flatten()
        # PEFT does not adapt an output head that shares the embedding's weights.
        pairs[layer] = LoraTensors(layer, a.T, b.T, scale, magnitude, head=not lookup)
    return pairs


def _peft_leaf(tensor: str) -> tuple[str, str] | None:
    inner = tensor.removeprefix("base_model.model.")
    leaf = r"lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
    found = re.fullmatch(rf"(.+)\.({leaf})(?:\.default)?(?:\.weight)?", inner)
    return (found[1], found[2]) if found else None


def _peft_scale(config: dict[str, Any], layer: str, rank: int) -> float:
    wanted = _pattern(config, "rank_pattern", layer, _number(config, "r"))
    if rank != wanted:
        raise AdapterInvalid(f"{layer}: the tensors have rank {rank}, {CONFIG} says {wanted:g}")
    alpha = _pattern(config, "alpha_pattern", layer, _number(config, "lora_alpha"))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(config: dict[str, Any], name: str, layer: str, otherwise: float) -> float:
    """Returns the first entry whose key is the layer or its last parts. PEFT allows regular
    expressions as keys; only plain names are supported, as a hostile pattern could run for ever."""
    entries = config.get(name) or {}
    if not isinstance(entries, dict):
        raise AdapterInvalid(f"{CONFIG}: {name} is not an object")
    for key in entries:
        plain = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not re.fullmatch(r"[\w.]+", plain):
            raise AdapterInvalid(f"{CONFIG}: {name} has {key!r}, which is not a layer's name")
        if layer == plain or (not key.startswith("^") and layer.endswith(f".{plain}")):
            return _number(entries, key)
    return otherwise


def _number(entries: Mapping[str, Any], key: str) -> float:
    value = entries.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterInvalid(f"{CONFIG}: {key} is {value!r}, which is not a finite number")
    return float(value)


def _leaves(weights: Path, leaf_of: Callable[[str], tuple[str, str] | None]) -> dict[str, Leaves]:
    """Returns the tensors by layer, and then by their role in it."""
    try:
        tensors = mx.load(str(weights))
    except Exception as error:
        raise AdapterInvalid(f"{weights.name} can't be read: {public_message(error)}") from error
    assert isinstance(tensors, dict)
    layers: dict[str, Leaves] = {}
    for name, tensor in tensors.items():
        found = leaf_of(name)
        if found is None:
            raise AdapterInvalid(f"{name}: not a LoRA tensor")
        layer, leaf = found
        layers.setdefault(layer, {})[leaf] = tensor
    if not layers:
        raise AdapterInvalid(f"{weights.name} holds no tensors")
    return layers


def _parts(
    layer: str, leaves: Leaves, names: tuple[str, ...], *, dora: bool
) -> tuple[mx.array, mx.array, mx.array | None]:
    a, b, magnitude = (leaves.get(name) for name in names)
    if a is None or b is None:
        raise AdapterInvalid(f"{layer}: {names[0 if a is None else 1]} is missing")
    if dora != (magnitude is not None):
        raise AdapterInvalid(f"{layer}: {names[2]} {'is missing' if dora else 'is not LoRA'}")
    if set(leaves) - set(names):
        raise AdapterInvalid(f"{layer}: {sorted(set(leaves) - set(names))[0]} does not belong here")
    floating = all(mx.issubdtype(array.dtype, mx.floating) for array in leaves.values())
    if a.ndim not in (2, 3) or a.ndim != b.ndim or not floating:
        raise AdapterInvalid(f"{layer}: {names[0]} and {names[1]} are not two matrices of floats")
    return a, b, magnitude


ONE_EXPERT = re.compile(r"(.+)\.experts\.(0|[1-9]\d{0,3})\.(\w+)")

BLOCKS = ("switch_mlp", "experts")
"""The names that mlx-lm's models give to all experts of a layer."""

STACKED_AS: Mapping[str, tuple[str, ...]] = {
    "w1": ("gate_proj",),
    "w2": ("down_proj",),
    "w3": ("up_proj",),
    "up_proj": ("up_proj", "fc1"),
    "down_proj": ("down_proj", "fc2"),
}
"""The names in mlx-lm's models of an expert's linears, where they may differ from transformers'."""


def stacked(
    pairs: Mapping[str, LoraTensors], is_layer: Callable[[str], bool]
) -> dict[str, LoraTensors]:
    """Returns the pairs, with one for all experts of a layer in place of one for each expert.

    is_layer: whether the model has a layer of this name.
    """
    found: dict[str, LoraTensors] = {}
    experts: dict[str, dict[int, LoraTensors]] = {}
    for layer, pair in pairs.items():
        of_one = None if is_layer(layer) else ONE_EXPERT.fullmatch(layer)
        whole = next(filter(is_layer, _stacks(*of_one.group(1, 3))), None) if of_one else None
        if of_one is None or whole is None or whole in pairs:
            found[layer] = pair
            continue
        others, number = experts.setdefault(whole, {}), int(of_one[2])
        if number in others:
            raise AdapterInvalid(f"{pair.name} and {others[number].name} are the same layer")
        others[number] = pair
    return found | {layer: _stack(each) for layer, each in experts.items()}


def _stacks(block: str, linear: str) -> list[str]:
    names = STACKED_AS.get(linear, (linear,))
    return [f"{block}.{experts}.{name}" for experts in BLOCKS for name in names]


def _stack(experts: Mapping[int, LoraTensors]) -> LoraTensors:
    pairs = [experts[number] for number in sorted(experts)]
    first = pairs[0]
    if missing := set(range(max(experts))) - experts.keys():
        raise AdapterInvalid(f"{first.name}: the same layer of expert {min(missing)} is missing")
    for pair in pairs:
        if (pair.a.shape, pair.b.shape, pair.scale) != (first.a.shape, first.b.shape, first.scale):
            raise AdapterInvalid(f"{pair.name}: its rank or scale is not that of {first.name}")
    a, b = mx.stack([pair.a for pair in pairs]), mx.stack([pair.b for pair in pairs])
    return replace(first, a=a, b=b)
