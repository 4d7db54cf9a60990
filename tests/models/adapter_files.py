"""Adapters in both formats, and ways to break them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mlx_server.errors import AdapterInvalid
from mlx_server.models.adapter_config import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS
from mlx_server.models.adapter_reader import AdapterSpec, read_adapter

IN, OUT, VOCABULARY, RANK = 64, 32, 100, 4
LAYER = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.switch_mlp.up_proj"
EMBEDDING = "model.embed_tokens"

SHAPES = {
    LAYER: (OUT, IN),
    "model.layers.1.self_attn.q_proj": (OUT, IN),
    EXPERTS: (3, OUT, IN),
    EMBEDDING: (VOCABULARY, IN),
}

MLX: dict[str, Any] = {
    "model": "org/Tiny-1B-4bit",
    "fine_tune_type": "lora",
    "num_layers": 1,
    "lora_parameters": {"rank": RANK, "scale": 2.0, "dropout": 0.0},
}
PEFT: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/Tiny-1B",
    "r": RANK,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "bias": "none",
    "modules_to_save": None,
}

Tensors = dict[str, NDArray[Any]]
Break = Callable[[Path], object]


def numbers(*shape: int, dtype: Any = np.float16) -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def mlx_tensors(layer: str = LAYER, rank: int = RANK) -> Tensors:
    return {f"{layer}.lora_a": numbers(IN, rank), f"{layer}.lora_b": numbers(rank, OUT)}


def peft_tensors(layer: str = LAYER, rank: int = RANK) -> Tensors:
    outer = f"base_model.model.{layer}"
    return {
        f"{outer}.lora_A.weight": numbers(rank, IN),
        f"{outer}.lora_B.weight": numbers(OUT, rank),
    }


def mlx_adapter(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**MLX, **config}))
    save_file(mlx_tensors() if tensors is None else tensors, folder / MLX_WEIGHTS)
    return folder


def peft_adapter(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**PEFT, **config}))
    save_file(peft_tensors() if tensors is None else tensors, folder / PEFT_WEIGHTS)
    return folder


def read(folder: Path) -> AdapterSpec:
    return read_adapter(folder, base_shapes=SHAPES, complete=True)


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterInvalid) as caught:
        read(folder)
    assert caught.value.status == 400
    assert caught.value.code == "adapter_invalid"
    assert len(caught.value.message) < 1000
    return caught.value.message


def config(text: str) -> Break:
    return lambda folder: (folder / CONFIG).write_text(text)


def tensors(found: Tensors) -> Break:
    return lambda folder: save_file(found, folder / MLX_WEIGHTS)


def with_config(**changes: Any) -> Break:
    return config(json.dumps({**MLX, **changes}))


def rank(value: object) -> Break:
    return with_config(lora_parameters={"rank": value, "scale": 1.0})


def scale(value: object) -> Break:
    return with_config(lora_parameters={"rank": RANK, "scale": value})


# The catalog of a model
