"""The weights' files: the headers of safetensors, read without loading any tensor, and the memory
that the weights will take.
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlx_server import limits
from mlx_server.errors import ModelUnusable
from mlx_server.models.files import BYTES, other_than_weights
from mlx_server.system.files import open_regular

SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

METADATA = "__metadata__"


class BadHeader(Exception):
    """The file is invalid. The message continues a sentence that begins with the file's name."""


class NoWeights(BadHeader):
    """The file is of another kind. The message also says what to do."""


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset in the file, in bytes."""
    end: int


@dataclass(frozen=True)
class TensorsHeader:
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, object]


def read_header(file: BinaryIO, size: int, most: int) -> TensorsHeader:
    """The header of an open file of `size` bytes; it may have `most` bytes. Raises BadHeader."""
    start = file.read(BYTES)
    if start[8:9] != b"{" and (what := other_than_weights(start)):
        raise NoWeights(what)
    file.seek(8)
    if len(start) < 8:
        raise BadHeader("is cut short")
    (length,) = struct.unpack_from("<Q", start)
    if length > most:
        raise BadHeader(f"has a header of {length:,} bytes; the limit is {most:,}")
    text = file.read(length)
    if len(text) < length:
        raise BadHeader("is cut short")
    try:
        entries = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        raise BadHeader("has a header that is not JSON") from None
    if not isinstance(entries, dict):
        raise BadHeader("has a header that is not a JSON object")
    metadata = entries.pop(METADATA, {})
    tensors = {name: _tensor(name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(tensors, 8 + length, size)
    return TensorsHeader(tensors, metadata if isinstance(metadata, dict) else {})


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise BadHeader(f"names {name!r} twice")
    return found


def _tensor(name: str, entry: Any, data: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, begin, end)
        is_valid = all(type(n) is int and n >= 0 for n in numbers)
        if is_valid and math.prod(shape) * SIZES[dtype] == end - begin:
            return Tensor(dtype, tuple(shape), data + begin, data + end)
    except (TypeError, KeyError, ValueError):
        pass
    raise BadHeader(f"has an invalid header entry for the tensor {name!r}")


def _check_layout(tensors: Mapping[str, Tensor], data: int, size: int) -> None:
    """Raise BadHeader unless the tensors fill the file from the header to its end."""
    reached = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != reached:
            raise BadHeader(f"has tensors that overlap or leave a gap, at {name!r}")
        reached = tensor.end
    if reached > size:
        raise BadHeader("is cut short")
    if reached < size:
        raise BadHeader("is longer than its header says")


def read_header_of(path: Path, most: int) -> TensorsHeader:
    """Raises BadHeader or OSError."""
    with open_regular(path) as file:
        return read_header(file, os.fstat(file.fileno()).st_size, most)


NOT_OF_MLX = frozenset({"F64", "F8_E5M2"})


def weights_bytes(path: Path, upcast: bool) -> int:
    """Memory of the weights; with `upcast`, half precision is loaded as float32."""
    return sum(_tensor_bytes(file, upcast) for file in _weight_files(path))


def tensor_names(path: Path) -> Iterator[str]:
    """The names of all tensors of the weights. Raises ModelUnusable."""
    for file in _weight_files(path):
        yield from _tensors(file)


def weights_on_disk(path: Path) -> int:
    """The bytes of the weight files. Raises ModelUnusable if one is missing."""
    return sum(file.stat().st_size for file in _weight_files(path))


def _weight_files(path: Path) -> list[Path]:
    """The weight files that mlx-lm reads. The index is not asked: many conversions carry that of
    the original. Raises ModelUnusable if there are none."""
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise _unusable(path / "model.safetensors", "is missing")
    return files


def _tensor_bytes(file: Path, upcast: bool) -> int:
    tensors = _tensors(file)
    if strange := sorted({tensor.dtype for tensor in tensors.values()} & NOT_OF_MLX):
        raise _unusable(file, f"contains the type {strange[0]}, which MLX cannot read")
    return sum((t.end - t.begin) * _growth(t.dtype, upcast) for t in tensors.values())


def _tensors(file: Path) -> Mapping[str, Tensor]:
    try:
        return read_header_of(file, limits.CHECKPOINT_HEADER_BYTES).tensors
    except OSError as error:
        raise _unusable(file, f"cannot be read ({error.strerror})") from None
    except NoWeights as error:
        raise ModelUnusable(_in_folder(file, f"{error}.")) from None
    except BadHeader as error:
        raise _unusable(file, f"is damaged: it {error}") from None


def _growth(dtype: str, upcast: bool) -> int:
    """The factor by which a loaded tensor is larger than in its file."""
    unpacked = 2 if dtype.startswith("F8_") else 1  # most models unpack it to bfloat16
    return unpacked * (2 if upcast and (unpacked == 2 or dtype in ("F16", "BF16")) else 1)


def _unusable(file: Path, what: str) -> ModelUnusable:
    advice = "Download the model again, or convert it with `mlx_lm.convert`."
    return ModelUnusable(_in_folder(file, f"{what}. {advice}"))


def _in_folder(file: Path, what: str) -> str:
    return f"{file.name} in the model's folder {file.parent.name!r} {what}"
