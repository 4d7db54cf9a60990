"""Tiny adapters with random weights, in both formats, and mlx-lm's own reading of them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from mlx_server.worker import weights

RANK, SCALE = 4, 2.0
LINEARS = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)


def network(path: Path) -> Any:
    return weights.loaded(path)


def linears_of(path: Path) -> list[str]:
    """Within a layer of the model."""
    layers = network(path).layers
    return sorted({k for layer in layers for k, m in layer.named_modules() if type(m) in LINEARS})


def mlx_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int = 0,
    rank: int = RANK,
    scale: float = SCALE,
    keys: Sequence[str] | None = None,
    dora: bool = False,
) -> Path:
    """keys: linears within a layer, or other modules by their whole path; None: all linears."""
    model = network(base)
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.0}
    parameters["keys"] = linears_of(base) if keys is None else list(keys)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), parameters, use_dora=dora)
    shapes = tree_flatten(model.trainable_parameters())
    random = mx.random.split(mx.random.key(seed), len(shapes))
    tensors = {
        name: _random(name, array, key)
        for (name, array), key in zip(sorted(shapes), random, strict=True)
    }
    config = {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": len(model.layers),
        "lora_parameters": parameters,
    }
    return save(folder, config, tensors)


def _random(name: str, array: mx.array, key: mx.array) -> mx.array:
    noise = mx.random.normal(array.shape, key=key)
    if name.endswith(".m"):
        return array * (1 + 0.2 * noise)
    if name.endswith("lora_a"):
        return noise * 0.1
    return noise * 0.3


def save(folder: Path, config: Any, tensors: dict[str, mx.array], *, peft: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    mx.save_safetensors(str(weights_of(folder, peft=peft)), tensors)
    return folder


def weights_of(folder: Path, *, peft: bool = False) -> Path:
    return folder / ("adapter_model.safetensors" if peft else "adapters.safetensors")


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Of an adapter in mlx-lm's format: its configuration and its tensors."""
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    tensors: Any = mx.load(str(weights_of(folder)))
    return config, tensors


def weakened(folder: Path, adapter: Path, share: float) -> Path:
    config, tensors = contents(adapter)
    config["lora_parameters"]["scale"] *= share
    return save(folder, config, tensors)


def peft_adapter(
    folder: Path, adapter: Path, *, rslora: bool = False, wide: str | None = None, **config: Any
) -> Path:
    """The same as one in mlx-lm's format. wide: this linear is given two more ranks, of zeros."""
    theirs, tensors = contents(adapter)
    rank, scale = theirs["lora_parameters"]["rank"], theirs["lora_parameters"]["scale"]
    renamed = {}
    for name, tensor in tensors.items():
        layer, leaf = name.rsplit(".", 1)
        if wide and layer.endswith(wide) and leaf != "m":
            axis = 1 if leaf == "lora_a" else 0
            tensor = mx.pad(tensor, [(0, 2 * (side == axis)) for side in range(2)])
        if leaf == "m":
            renamed[f"base_model.model.{layer}.lora_magnitude_vector"] = tensor
            continue
        part = leaf[-1].upper()
        part = f"lora_embedding_{part}" if "embed" in layer else f"lora_{part}.weight"
        renamed[f"base_model.model.{layer}.{part}"] = mx.contiguous(tensor.T)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": scale * (math.sqrt(rank) if rslora else rank),
        "use_rslora": rslora,
        "use_dora": theirs["fine_tune_type"] == "dora",
        "bias": "none",
    }
    if wide:
        settings["rank_pattern"] = {wide: rank + 2}
        settings["alpha_pattern"] = {wide: scale * (rank + 2)}
    return save(folder, {**settings, **config}, renamed, peft=True)


def with_adapter(base: Path, adapter: Path | None) -> Any:
    """As mlx-lm serves it."""
    model = network(base)
    if adapter is not None:
        load_adapters(model, str(adapter))
        model.eval()
    return model
