"""The contents of a prompt cache file: safetensors, whose last tensor is a checksum of the rest.

A file may be damaged, or made by another program. It is read only if its checksum, its name and
its tokens are right, and nothing in it decides which class is made or how much is read.
"""

import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_server.models.weights_files import SIZES, BadHeader, TensorsHeader, read_header
from mlx_server.prompt_files.names import Ids, PromptFile

CHECKSUM, TOKENS = "checksum", "tokens"
CHECKSUM_BYTES = sha256().digest_size

HEADER_BYTES = 1 << 20
"""A larger header is a damaged one: real ones have some 100 bytes for each array of a layer."""

PIECE_BYTES = 8 << 20
"""The bytes that are read, hashed and written at a time."""

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Stands in for a tensor's type by the size of its items: NumPy has no bfloat16."""

Bits = NDArray[Any]
"""The items of a tensor as unsigned numbers."""


class DamagedFile(Exception):
    """The file can't be used. The message continues a sentence that begins with the file."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    dtype: str
    """The dtype by safetensors' name."""
    shape: tuple[int, ...]
    data: memoryview
    """The bytes in C order."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The dtype and shape that a tensor of a file must have. None stands for a dimension of any
    size."""

    dtype: str
    shape: tuple[int | None, ...]

    def fits(self, dtype: str, shape: tuple[int, ...]) -> bool:
        pairs = zip(self.shape, shape, strict=False)
        sizes = all(wanted in (None, found) for wanted, found in pairs)
        return dtype == self.dtype and len(shape) == len(self.shape) and sizes


@dataclass(frozen=True)
class Contents:
    about: Mapping[str, Any]
    """The description that `encoded` was given: the model's id and the state's numbers."""
    tensors: Mapping[str, tuple[str, Bits]]
    """Type and items by name."""
    ids: Ids
    """The tokens that only this file stands for."""


def encoded(
    file: PromptFile, ids: Ids, about: Mapping[str, Any], tensors: Mapping[str, RawTensor]
) -> list[memoryview]:
    """The file in pieces. ids: the tokens that only this file stands for."""
    own = memoryview(ids.tobytes())
    every = {**tensors, TOKENS: RawTensor("U32", (len(ids),), own)}
    header: dict[str, Any] = {"__metadata__": {"file": file.name, "about": json.dumps(about)}}
    end = 0
    for name, tensor in every.items():
        begin, end = end, end + tensor.data.nbytes
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        header[name] = entry
    last = [end, end + CHECKSUM_BYTES]
    header[CHECKSUM] = {"dtype": "U8", "shape": [CHECKSUM_BYTES], "data_offsets": last}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return [memoryview(start), *(tensor.data for tensor in every.values())]


def written(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The pieces in sizes to write at a time, and their checksum."""
    whole = sha256()
    for piece in pieces:
        flat = piece.cast("B")
        for begin in range(0, flat.nbytes, PIECE_BYTES):
            part = flat[begin : begin + PIECE_BYTES]
            whole.update(part)
            yield part
    yield memoryview(whole.digest())


def read(path: Path, file: PromptFile, most_bytes: int) -> Contents:
    """Reads and checks a file. Raises DamagedFile, or OSError."""
    data = _checked_bytes(path, most_bytes)
    try:
        header = read_header(BytesIO(data), len(data), HEADER_BYTES)
    except BadHeader as error:
        raise DamagedFile(str(error)) from None
    if header.metadata.get("file") != file.name:
        raise DamagedFile("is not the file that its name says")
    tensors = {name: _items(data, header, name) for name in header.tensors if name != CHECKSUM}
    dtype, own = tensors.pop(TOKENS, ("", np.empty(0)))
    if dtype != "U32" or own.ndim != 1:
        raise DamagedFile("does not say which tokens it is for")
    return Contents(_about(header), tensors, own)


def model_in(path: Path) -> str | None:
    """The id of the model that made the file; None if the file does not say. Raises OSError."""
    with _opened(path) as opened:
        try:
            header = read_header(opened, os.fstat(opened.fileno()).st_size, HEADER_BYTES)
            model = _about(header).get("model")
        except (BadHeader, DamagedFile):
            return None
    return model if isinstance(model, str) else None


def _opened(path: Path) -> Any:
    """Opens a regular file of our own and no link; a pipe would keep its reader waiting for ever.
    Another user may know the tokens of a prompt, and so how to name a file for them."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    opened = os.fdopen(os.open(path, flags), "rb", buffering=0)
    found = os.fstat(opened.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return opened
    opened.close()
    raise DamagedFile("is not a regular file of this user")


def _checked_bytes(path: Path, most_bytes: int) -> bytearray:
    with _opened(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        if not CHECKSUM_BYTES < size <= most_bytes:
            raise DamagedFile(f"has {size:,} bytes")
        data, whole = bytearray(size), sha256()
        view, summed = memoryview(data), size - CHECKSUM_BYTES
        done = 0
        while done < size:
            count = opened.readinto(view[done : done + PIECE_BYTES])
            if not count:
                raise DamagedFile("is cut short")
            whole.update(view[min(done, summed) : min(done + count, summed)])
            done += count
    if whole.digest() != data[summed:]:
        raise DamagedFile("has a wrong checksum")
    return data


def _items(data: bytearray, header: TensorsHeader, name: str) -> tuple[str, Bits]:
    tensor = header.tensors[name]
    width = WIDTHS[SIZES[tensor.dtype]]
    items = np.frombuffer(data, width, prod(tensor.shape), tensor.begin)
    return tensor.dtype, items.reshape(tensor.shape)


def _about(header: TensorsHeader) -> Mapping[str, Any]:
    try:
        about = json.loads(str(header.metadata.get("about")))
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise DamagedFile("does not say what it holds")
    return about
