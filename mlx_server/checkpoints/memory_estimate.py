"""Estimates from a model's files how much memory its weights will take."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from mlx_server import limits
from mlx_server.checkpoints.safetensors_headers import BadHeader, NoWeights, Tensor, read_header_of
from mlx_server.errors import ModelUnusable

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
