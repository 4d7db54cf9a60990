"""Headers of safetensors files: what is read is what the format says, and the rest is refused."""

import io
import json
import re
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


def refusal(header: Any, data: int = 0) -> str:
    with pytest.raises(BadHeader) as refused:
        read(header, data)
    return str(refused.value)


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


@pytest.mark.parametrize("dtype", SIZES)
def test_each_type_has_its_size(dtype: str) -> None:
    bits = re.search(r"\d+", dtype)
    read({"a": entry(3, dtype=dtype)}, 3 * (int(bits[0]) // 8 if bits else 1))
    assert "invalid header entry" in refusal({"a": {**entry(3, dtype=dtype), "shape": [4]}})


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry(2)}, 3, "is cut short"),
        ({"a": entry(2)}, 5, "is longer than its header says"),
        ({}, 1, "is longer than its header says"),
        ({"a": entry(2, begin=1)}, 5, "overlap or leave a gap, at 'a'"),
        ({"a": entry(2), "b": entry(2, begin=2)}, 6, "overlap or leave a gap, at 'b'"),
        ({"a": entry(2), "b": entry(2)}, 4, "overlap or leave a gap, at 'b'"),
        ({"a": entry(0), "b": entry(2, begin=2), "c": entry(1)}, 7, "is longer than"),
        ({"a": {**entry(2), "data_offsets": [0, 2, 4]}}, 4, "entry for the tensor 'a'"),
        ({"a": {**entry(2), "data_offsets": [0.0, 4.0]}}, 4, "entry for the tensor 'a'"),
        ({"a": {**entry(2), "shape": [True, 2]}}, 4, "entry for the tensor 'a'"),
        ({"a": {**entry(2), "shape": [-1, -2]}}, 4, "entry for the tensor 'a'"),
        ({"a": {**entry(2), "shape": {"2": 2}}}, 4, "entry for the tensor 'a'"),
        ({"a": {**entry(2), "dtype": "f16"}}, 4, "entry for the tensor 'a'"),
        ({"a": {**entry(2), "dtype": ["F16"]}}, 4, "entry for the tensor 'a'"),
        ({"a": {**entry(2), "shape": [1 << 62] * 60}}, 4, "entry for the tensor 'a'"),
        ({"a": None}, 0, "entry for the tensor 'a'"),
        ([], 0, "not a JSON object"),
        (b'{"a": {"x": 1, "x": 2}}', 0, "names 'x' twice"),
        (b'{"__metadata__": {}, "__metadata__": {}}', 0, "names '__metadata__' twice"),
        (b'{"\xff": 1}', 0, "not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", 0, "not JSON"),
        (b"[" * 100_000, 0, "not JSON"),
        (b"", 0, "begins with zeros"),
    ],
)
def test_what_is_no_such_file_says_why(header: Any, data: int, says: str) -> None:
    assert says in refusal(header, data)


@pytest.mark.parametrize("metadata", [None, [], "x", 5])
def test_metadata_of_another_type_count_as_none(metadata: Any) -> None:
    assert read({"__metadata__": metadata}).metadata == {}


def test_a_header_over_the_limit_is_not_read() -> None:
    text = b"{}".ljust(100)
    assert read(text, most=100).tensors == {}
    with pytest.raises(BadHeader, match="has a header of 100 bytes; the limit is 99"):
        read(text, most=99)
    file = io.BytesIO(b"\xff" * 8 + b"{}")
    with pytest.raises(BadHeader, match="18,446,744,073,709,551,615 bytes"):
        read_header(file, 10, MOST)
    assert file.tell() == 8


@pytest.mark.parametrize("size", [0, 7, 8, 9])
def test_a_file_that_ends_within_its_header_is_cut_short(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(((2).to_bytes(8, "little") + b"{}")[:size])
    with pytest.raises(BadHeader, match="is cut short" if size else "is empty"):
        read_header_of(path, MOST)
