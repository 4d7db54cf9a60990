"""Reads one adapter's files, as data only and within limits, because they are untrusted."""

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlx_server import limits
from mlx_server.models.adapter_config import (
    CONFIG,
    MLX_WEIGHTS,
    PARTS,
    PEFT_WEIGHTS,
    TENSORS,
    AdapterConfig,
    Format,
    Kind,
    Misfit,
    invalid,
    plain_path,
    read_config,
)
from mlx_server.models.files import BadHeader, NoWeights, Tensor, TensorsHeader, is_own, read_header
from mlx_server.system.files import open_regular

CHUNK = 1 << 20

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

EXPONENTS = {"F16": ("uint16", 0x7C00), "BF16": ("uint16", 0x7F80), "F32": ("uint32", 0x7F80_0000)}
"""Maps a dtype to the integer type of its size and the bits that only infinities and NaNs set
fully; numpy has no bfloat16."""

REARRANGED = re.compile(r"\.(?:experts|shared_mlp|[qkv]_proj|\w*qkv\w*|gate\w*_up_proj)(?:\.|$)")
"""Layers of transformers that mlx-lm's models may have in parts or as one for all experts."""

Stamp = tuple[tuple[int, ...] | None, ...]


def stamp_of(folder: Path) -> Stamp:
    """A value that changes when a file of the adapter is replaced or written to."""
    return tuple(_stamp_of(folder / name) for name in (CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS))


def _stamp_of(file: Path) -> tuple[int, ...] | None:
    """Returns None if there is no file. The time of the last change is in it, since a copy that
    keeps its times may get the inode, the times and the size of the file that it replaces."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter whose files were checked; its weights are not in memory."""

    name: str
    path: Path
    digest: str
    """The SHA-256 of its config and weights, in hex."""
    rank: int
    """The largest rank of any layer."""
    nbytes: int
    """The bytes of its pairs in the file."""
    kind: Kind
    base: str | None
    """The model that it was trained on, according to its config."""
    format: Format
    stamp: Stamp = (None, None, None)
    """The stamp of its files, taken before they were read."""


@dataclass(frozen=True)
class _LoraNames:
    """The tensors of one layer, with their names in the file; `m` is DoRA's magnitude."""

    layer: str
    a: tuple[str, Tensor]
    b: tuple[str, Tensor]
    m: tuple[str, Tensor] | None


def read_adapter(
    folder: Path, *, base_shapes: Mapping[str, tuple[int, ...]] | None, complete: bool = False
) -> AdapterSpec:
    """Reads and checks all files. Raises AdapterInvalid.

    complete: `base_shapes` has all layers of the model. Otherwise unknown layers pass here, and the
    engine, which knows their final names, checks them.
    """
    try:
        return _read(folder, base_shapes or {}, complete=complete)
    except Misfit as misfit:
        raise invalid(folder, misfit) from None


def _read(
    folder: Path, base_shapes: Mapping[str, tuple[int, ...]], *, complete: bool
) -> AdapterSpec:
    if folder.is_file():
        raise Misfit(f"is a file. Give the folder that it is in, which also has {CONFIG}")
    if not folder.exists():
        raise Misfit("has no folder: correct its path, or make it")
    stamp = stamp_of(folder)
    config_file = _file(folder, CONFIG)
    if config_file is None:
        raise Misfit(f"has no {CONFIG}. Copy the one that was saved with the weights")
    text = _config_text(folder, config_file)
    config = read_config(folder, text)
    weights = _weights_file(folder, PEFT_WEIGHTS if config.format == "peft" else MLX_WEIGHTS)
    try:
        with open_regular(weights) as file:
            size = os.fstat(file.fileno()).st_size
            header = read_header(file, size, limits.ADAPTER_HEADER_BYTES)
            pairs = _pairs(config, header)
            rank = max(_rank(config, pair) for pair in pairs)
            _check_shapes(config.format, pairs, base_shapes, complete)
            digest = _digest(text, file, header)
    except NoWeights as error:
        raise Misfit(f"can't be read: {weights.name} {error}") from None
    except BadHeader as error:
        raise Misfit(f"is damaged: {weights.name} {error}. Copy it again") from None
    except OSError as error:
        raise _unreadable(weights.name, error) from None
    tensors = [each[1] for pair in pairs for each in (pair.a, pair.b, pair.m) if each]
    nbytes = sum(tensor.end - tensor.begin for tensor in tensors)
    return AdapterSpec(
        name=folder.name,
        path=folder,
        digest=digest,
        rank=rank,
        nbytes=nbytes,
        kind=config.kind,
        base=config.base,
        format=config.format,
        stamp=stamp,
    )


def _unreadable(file: str, error: OSError) -> Misfit:
    return Misfit(f"can't be read: {file}: {error.strerror}. Check its permissions")


def names_in(folder: Path | None) -> list[str]:
    try:
        return os.listdir(folder) if folder else []
    except OSError:
        return []


def _config_text(folder: Path, file: Path) -> bytes:
    try:
        with open_regular(file) as opened:
            text = opened.read(limits.ADAPTER_CONFIG_BYTES + 1)
    except OSError as error:
        raise _unreadable(CONFIG, error) from None
    if len(text) > limits.ADAPTER_CONFIG_BYTES:
        raise Misfit(f"is refused: {CONFIG} is larger than {limits.ADAPTER_CONFIG_BYTES:,} bytes")
    return text


def _file(folder: Path, name: str) -> Path | None:
    """The path of the file; None if it does not exist. Raises AdapterInvalid."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    if not is_own(path, folder):
        raise Misfit(
            f"is not all in its folder: {name} is a link to outside of it. Copy the file there"
        )
    if not path.is_file():
        raise Misfit(f"is damaged: {name} is not a file. Copy the adapter again")
    return path


def _weights_file(folder: Path, name: str) -> Path:
    if (path := _file(folder, name)) is not None:
        return path
    names = sorted(names_in(folder))
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        raise Misfit(
            f"has its weights only in {pickles[0]}, which is never opened because such files can "
            f"run code. Save them as {name}"
        )
    others = [other for other in names if other.endswith(".safetensors")]
    remedy = "Copy it there"
    if others:
        is_other_format = others[-1] in (MLX_WEIGHTS, PEFT_WEIGHTS)
        what = f"Copy the {CONFIG} that belongs to" if is_other_format else "Rename"
        remedy = f"{what} {others[-1][:100]}"
    raise Misfit(f"has no {name}. {remedy}")


def _pairs(config: AdapterConfig, header: TensorsHeader) -> list[_LoraNames]:
    layers: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for name, tensor in header.tensors.items():
        match = TENSORS[config.format].fullmatch(name)
        if match is None or len(name) > 1000:  # far above any in use
            raise Misfit(f"is refused: its tensor {name[:200]!r} is not a LoRA tensor")
        part = PARTS.get(match[2], match[2])
        if part in layers.setdefault(match[1], {}):
            raise Misfit(f"is refused: it has the tensor {name[:200]!r} under two names")
        layers[match[1]][part] = name, tensor
        _check_tensor(name, tensor)
    if not layers:
        raise Misfit("is empty: its weights have no tensors. Train or copy it again")
    return [_pair(layer, parts, config.kind) for layer, parts in layers.items()]


def _check_tensor(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in EXPONENTS:
        raise Misfit(
            f"is refused: its tensor {name[:200]!r} has the type {tensor.dtype}. "
            f"Save it as one of {', '.join(EXPONENTS)}"
        )
    if not all(tensor.shape):
        raise Misfit(f"is refused: its tensor {name[:200]!r} is empty")


def _pair(layer: str, parts: Mapping[str, tuple[str, Tensor]], kind: Kind) -> _LoraNames:
    for part in ("lora_a", "lora_b") + (("m",) if kind == "dora" else ()):
        if part not in parts:
            what = "DoRA magnitude" if part == "m" else f"{part}, one half of the LoRA pair,"
            raise Misfit(f"is refused: it has no {what} for the layer {layer[:200]!r}")
    if kind == "lora" and "m" in parts:
        raise Misfit(f"is refused: {parts['m'][0]!r} is a DoRA tensor, but {CONFIG} says LoRA")
    pair = _LoraNames(layer, parts["lora_a"], parts["lora_b"], parts.get("m"))
    a, b = pair.a[1].shape, pair.b[1].shape
    if len(a) not in (2, 3) or len(a) != len(b) or (len(a) == 3 and a[0] != b[0]):
        raise Misfit(
            f"is refused: its tensors {pair.a[0]!r} {a} and {pair.b[0]!r} {b} are not a pair"
        )
    return pair


def _rank(config: AdapterConfig, pair: _LoraNames) -> int:
    """The rank of a pair. Raises AdapterInvalid if tensors and config disagree on it."""
    a, b = _inner(config.format, pair)
    if a != b or a > limits.ADAPTER_RANK:
        shapes = f"{pair.a[0]!r} {pair.a[1].shape} and {pair.b[0]!r} {pair.b[1].shape}"
        what = "differ in rank" if a != b else f"have a rank over {limits.ADAPTER_RANK}"
        raise Misfit(f"is refused: its tensors {shapes} {what}")
    if config.rank not in (None, a):
        raise Misfit(
            f"is refused: its tensor {pair.a[0]!r} {pair.a[1].shape} has the rank {a}, but "
            f"{CONFIG} says {config.rank}. Copy both files of the same training run"
        )
    return a


def _is_transposed(format: Format, pair: _LoraNames) -> bool:
    """Whether the pair is stored as (rank, in) and (out, rank): PEFT's, and mlx-lm's experts."""
    return format == "peft" or len(pair.a[1].shape) == 3


def _inner(format: Format, pair: _LoraNames) -> tuple[int, int]:
    a, b = pair.a[1].shape, pair.b[1].shape
    return (a[-2], b[-1]) if _is_transposed(format, pair) else (a[-1], b[-2])


def _outer(format: Format, pair: _LoraNames) -> tuple[int, ...]:
    """The shape of the layer that the pair fits, (out, in) or (experts, out, in)."""
    a, b = pair.a[1].shape, pair.b[1].shape
    if _is_transposed(format, pair):
        return (*b[:-1], a[-1])
    return (b[-1], a[-2])


def _check_shapes(
    format: Format,
    pairs: Sequence[_LoraNames],
    base_shapes: Mapping[str, tuple[int, ...]],
    complete: bool,
) -> None:
    if not base_shapes:
        return
    shapes = {plain_path(layer): shape for layer, shape in base_shapes.items()}
    if embedding := shapes.get("embed_tokens"):  # which may be the head too
        shapes.setdefault("lm_head", embedding)
    last = max(map(_number_of, shapes))
    unknown = [pair.layer for pair in pairs if plain_path(pair.layer) not in shapes]
    for layer in unknown:
        # PEFT uses the names of transformers, where one of mlx-lm's layers may be several.
        if _number_of(layer) > last >= 0 or (complete and format == "mlx"):
            raise Misfit(f"is for another model: this one has no layer {layer[:200]!r}")
    if complete and len(unknown) == len(pairs) and not any(map(REARRANGED.search, unknown)):
        raise Misfit(f"is for another model: it has no layer {unknown[0][:200]!r}")
    for pair in pairs:
        shape = shapes.get(plain_path(pair.layer))
        if shape and not _fits(pair, _outer(format, pair), shape, complete):
            raise Misfit(
                f"is for another model: its tensors {pair.a[0]!r} {pair.a[1].shape} and "
                f"{pair.b[0]!r} {pair.b[1].shape} don't fit a layer of the shape {shape}"
            )


def _number_of(layer: str) -> int:
    """The number of the block that the layer is in; -1 if it is in none."""
    match = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.", layer)
    return int(match[1]) if match else -1


def _fits(pair: _LoraNames, outer: tuple[int, ...], shape: tuple[int, ...], complete: bool) -> bool:
    # Embeddings are transposed, and so are some linear layers until mlx-lm transposes them.
    either_way = not complete or re.search("emb|wte", pair.layer.rpartition(".")[2])
    turned = (*outer[:-2], outer[-1], outer[-2])
    if outer != shape and not (either_way and turned == shape):
        return False
    return pair.m is None or math.prod(pair.m[1].shape) in (outer[-2], shape[-2])


def _digest(config: bytes, file: BinaryIO, header: TensorsHeader) -> str:
    """The digest of both files; in the same pass it checks that all weights are finite."""
    import numpy as np  # here, since it takes 0.1 s, and most servers read no adapter

    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    tensors = sorted(header.tensors.items(), key=lambda item: item[1].begin)
    file.seek(0)
    digest.update(file.read(tensors[0][1].begin))
    for name, tensor in tensors:
        for chunk in _chunks(file, tensor.end - tensor.begin):
            digest.update(chunk)
            bits, exponent = EXPONENTS[tensor.dtype]
            values = np.frombuffer(chunk, bits)
            if np.any(np.bitwise_and(values, values.dtype.type(exponent)) == exponent):
                raise Misfit(
                    f"is damaged: its tensor {name[:200]!r} has values that are not finite. "
                    "Train it again, with a lower learning rate"
                )
    return digest.hexdigest()


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    # The file is read, not mapped: truncating a mapped file would kill this process.
    while size:
        chunk = file.read(min(CHUNK, size))
        if len(chunk) < min(CHUNK, size):
            raise BadHeader("is cut short")
        size -= len(chunk)
        yield chunk
