"""Estimates from a model's files how much memory its weights will take."""

import json
from pathlib import Path

from mlx_server import limits
from mlx_server.checkpoints.safetensors_headers import BadHeader, read_header_of
from mlx_server.errors import ModelUnusable
from mlx_server.system.regular_files import read_regular

NOT_OF_MLX = frozenset({"F64", "F8_E5M2"})


def weights_bytes(path: Path, upcast: bool) -> int:
    """Memory of the weights; with `upcast`, half precision is loaded as float32."""
    return sum(_tensor_bytes(file, upcast) for file in _weight_files(path))


def weights_on_disk(path: Path) -> int:
    """The bytes of the weight files. Raises ModelUnusable if one is missing."""
    return sum(file.stat().st_size for file in _weight_files(path))


def _weight_files(path: Path) -> list[Path]:
    """The weight files that mlx-lm reads. Raises ModelUnusable if one is missing."""
    files = sorted(path.glob("model*.safetensors"))
    listed = _listed_files(path / "model.safetensors.index.json")
    missing = sorted(listed - {file.name for file in files})
    if missing or not files:
        name = missing[0] if missing else "model.safetensors"
        raise _unusable(path / name, "is missing")
    return files


def _listed_files(index: Path) -> set[str]:
    if not index.is_file():
        return set()
    try:
        shards = set(json.loads(read_regular(index))["weight_map"].values())
        return {shard for shard in shards if Path(shard).match("model*.safetensors")}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _unusable(index, "is damaged") from None


def _tensor_bytes(file: Path, upcast: bool) -> int:
    try:
        tensors = read_header_of(file, limits.CHECKPOINT_HEADER_BYTES.value).tensors
    except OSError as error:
        raise _unusable(file, f"cannot be read ({error.strerror})") from None
    except BadHeader as error:
        raise _unusable(file, f"is damaged: it {error}") from None
    if strange := sorted({tensor.dtype for tensor in tensors.values()} & NOT_OF_MLX):
        raise _unusable(file, f"contains the type {strange[0]}, which MLX cannot read")
    return sum((t.end - t.begin) * _growth(t.dtype, upcast) for t in tensors.values())


def _growth(dtype: str, upcast: bool) -> int:
    """The factor by which a loaded tensor is larger than in its file."""
    unpacked = 2 if dtype.startswith("F8_") else 1  # most models unpack it to bfloat16
    return unpacked * (2 if upcast and (unpacked == 2 or dtype in ("F16", "BF16")) else 1)


def _unusable(file: Path, what: str) -> ModelUnusable:
    return ModelUnusable(
        f"{file.name} in the model's folder {file.parent.name!r} {what}. "
        "Download the model again, or convert it with `mlx_lm.convert`."
    )
