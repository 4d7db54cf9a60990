"""The layers of a base model, from its files alone, and the names of its conversions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from mlx_server.models.adapter_catalog import plain_name, read_base_shapes
from tests.models.adapter_files import IN, LAYER, OUT, Tensors, numbers
from tests.tables import cases

# What the base's files tell


def checkpoint(folder: Path, found: Tensors, *, format: str = "mlx", **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(save(found, {"format": format}))
    return folder


def test_the_shapes_of_a_plain_base(tmp_path: Path) -> None:
    found = {f"{LAYER}.weight": numbers(OUT, IN), "model.norm.weight": numbers(IN)}
    base = read_base_shapes(checkpoint(tmp_path / "Tiny-1B-8bit", found), "org/Tiny-1B-8bit")
    assert base.shapes == {LAYER: (OUT, IN)}
    assert base.complete
    assert base.names == {"tiny-1b"}
    assert not read_base_shapes(checkpoint(tmp_path / "a", found, format="pt"), "a").complete
    (tmp_path / "Other-4bit" / "config.json").mkdir(parents=True)  # which is no file
    assert read_base_shapes(None, "org/Tiny-1B").names == {"tiny-1b"}
    assert read_base_shapes(tmp_path / "Other-4bit", "org/a").names == {"a", "other"}


@pytest.mark.parametrize(("bits", "packed"), [(4, IN // 8), (8, IN // 4), (6, IN * 6 // 32)])
def test_the_shapes_of_a_quantised_base(tmp_path: Path, bits: int, packed: int) -> None:
    found = {
        f"{LAYER}.weight": np.zeros((OUT, packed), np.uint32),
        f"{LAYER}.scales": numbers(OUT, 2),
    }
    several = {"bits": 3, LAYER: {"bits": bits}}
    for quantization in ({"bits": bits}, several):
        folder = checkpoint(tmp_path / str(len(quantization)), found, quantization=quantization)
        assert read_base_shapes(folder, "a").shapes == {LAYER: (OUT, IN)}
    assert read_base_shapes(checkpoint(tmp_path / "unsaid", found), "a").shapes == {}


@cases
def test_conversions_of_a_model_have_one_name(model: str, name: str) -> None:
    assert plain_name(model) == name
