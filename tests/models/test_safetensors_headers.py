"""Headers of safetensors files: what is read is what the format says, and the rest is refused."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_server.models.files import (
    SIZES,
    BadHeader,
    Tensor,
    TensorsHeader,
    read_header,
    read_header_of,
)

MOST = 1 << 20


def entry(*shape: int, begin: int = 0, dtype: str = "F16") -> dict[str, Any]:
    nbytes = SIZES[dtype] * int(np.prod(shape, dtype=object))
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, begin + nbytes]}


def read(header: Any, data: int = 0, most: int = MOST) -> TensorsHeader:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text
    return read_header(io.BytesIO(file), len(file) + data, most)


def test_a_file_of_the_formats_own_library(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "b": np.ones((2, 3), np.float32),
        "a": np.ones((), np.int8),
        "none": np.ones((0, 7)),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"format": "mlx"})
    found = read_header_of(path, MOST)
    assert found.metadata == {"format": "mlx"}
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()}
    assert shapes == {"b": ("F32", (2, 3)), "a": ("I8", ()), "none": ("F64", (0, 7))}
    b = found.tensors["b"]
    assert path.read_bytes()[b.begin : b.end] == tensors["b"].tobytes()


def test_offsets_are_those_in_the_file() -> None:
    header = {"b": entry(3, begin=4), "a": entry(2)}
    start = 8 + len(json.dumps(header))
    assert read(header, 10).tensors == {
        "a": Tensor("F16", (2,), start, start + 4),
        "b": Tensor("F16", (3,), start + 4, start + 10),
    }


def test_a_header_over_the_limit_is_not_read() -> None:
    text = b"{}".ljust(100)
    assert read(text, most=100).tensors == {}
    with pytest.raises(BadHeader, match="has a header of 100 bytes; the limit is 99"):
        read(text, most=99)
    file = io.BytesIO(b"\xff" * 8 + b"{}")
    with pytest.raises(BadHeader, match="18,446,744,073,709,551,615 bytes"):
        read_header(file, 10, MOST)
    assert file.tell() == 8
