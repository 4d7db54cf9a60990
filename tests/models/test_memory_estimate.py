"""Estimates made from files alone, held against what MLX really takes."""

import json
import struct
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlx_server.errors import ModelUnusable
from mlx_server.models.files import weights_bytes
from mlx_server.worker import weights


def loaded_bytes(folder: Path) -> int:
    return sum(array.nbytes for _, array in tree_flatten(weights.loaded(folder).parameters()))


def copied(source: Path, folder: Path, arrays: dict[str, mx.array], **config: Any) -> Path:
    folder.mkdir()
    config = {**json.loads((source / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def arrays_of(folder: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    return arrays


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_weights_are_what_the_engine_loads(tiny_path: Path, tmp_path: Path, dtype: Any) -> None:
    arrays = {name: array.astype(dtype) for name, array in arrays_of(tiny_path).items()}
    folder = copied(tiny_path, tmp_path / "model", arrays)
    upcast = not mx.metal.is_available()
    assert weights_bytes(folder, upcast) == loaded_bytes(folder)
    assert weights_bytes(folder, upcast=False) == sum(array.nbytes for array in arrays.values())


def test_packed_weights_stay_packed(tiny_path: Path, tiny_model: Any, tmp_path: Path) -> None:
    how = {"group_size": 32, "bits": 4}
    model = type(tiny_model)(tiny_model.args)
    model.update(tiny_model.parameters())
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, **how)
    arrays = dict(tree_flatten(model.parameters()))
    folder = copied(tiny_path, tmp_path / "model", arrays, quantization=how)
    assert weights_bytes(folder, not mx.metal.is_available()) == loaded_bytes(folder)


def file_of(header: object, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


DAMAGED = {
    "cut in the data": file_of(tensor(), data=7),
    "no JSON": file_of(b"{'a'}"),
    "another shape": file_of(tensor(shape=(3,))),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_weights_are_unusable(damage: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[damage])
    with pytest.raises(ModelUnusable, match=r"^model\.safetensors .* is damaged.*Download"):
        weights_bytes(tmp_path, upcast=True)


def test_weights_that_cannot_be_read_are_unusable(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelUnusable, match=r"^model\.safetensors .* cannot be read"):
        weights_bytes(tmp_path, upcast=True)


@pytest.mark.parametrize(
    ("dtype", "size", "as_is", "upcast"),
    [("BF16", 2, 8, 16), ("F32", 4, 16, 16), ("U32", 4, 16, 16), ("F8_E4M3", 1, 8, 16)],
)
def test_halves_grow_on_machines_without_metal(
    tmp_path: Path, dtype: str, size: int, as_is: int, upcast: int
) -> None:
    header = tensor(dtype, shape=(4,), offsets=(0, 4 * size))
    (tmp_path / "model.safetensors").write_bytes(file_of(header, data=4 * size))
    assert weights_bytes(tmp_path, upcast=False) == as_is
    assert weights_bytes(tmp_path, upcast=True) == upcast


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F16", "U8", "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 4)) | JSON,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | JSON,
    },
)


@pytest.mark.slow
@given(st.binary() | st.dictionaries(st.text(), ENTRIES | JSON).map(file_of))
def test_any_file_gives_a_number_or_is_unusable(content: bytes) -> None:
    with TemporaryDirectory() as folder, suppress(ModelUnusable):
        (Path(folder) / "model.safetensors").write_bytes(content)
        assert weights_bytes(Path(folder), upcast=True) >= 0
