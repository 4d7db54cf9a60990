"""A cached prompt as it is on disk: which arrays a model's caches have, and caches made of arrays.

Only entries of known classes are kept. The class of an entry always comes from the model, never
from a file, and so do all of its numbers but its length. Files are read into arrays of NumPy, in a
thread that does not use MLX.
"""

import errno
import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_server.models.files import SIZES
from mlx_server.prompt_files import (
    HEADER_BYTES,
    WIDTHS,
    DamagedFile,
    PromptFile,
    PromptFolder,
    PromptNames,
    Tensors,
    read,
)
from mlx_server.worker.kv_caches import make_caches
from mlx_server.worker.mlx_lm_internals import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_server.worker.prefill.memory_tier import Cache, Layers, split
from mlx_server.worker.ragged_caches import QuantizedRow

Arrays = dict[str, mx.array]
"""Arrays by the layer's number and their name in it."""

GROWING = (KVCache, QuantizedKVCache, QuantizedRow, RotatingKVCache)
"""The classes that have `keys` and `values`, arrays or several arrays each, with their tokens on
AXIS."""
AXIS = 2

NAMES = {
    mx.float32: "F32",
    mx.bfloat16: "BF16",
    mx.float16: "F16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint8: "U8",
    mx.int8: "I8",
}
"""The name of each type of array in safetensors files."""

TYPES = {name: dtype for dtype, name in NAMES.items()}

T = TypeVar("T")


def _leaves(layers: Layers, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each entry with its name; those of a list one by one."""
    for at, entry in layers.items():
        if isinstance(entry, CacheList):
            yield from _leaves(dict(enumerate(entry.caches)), f"{prefix}{at}.")
        else:
            yield f"{prefix}{at}", entry


def arrays_of(layers: Layers) -> Arrays:
    """Returns the arrays of the layers, without the part that is allocated but not used."""
    leaves = _leaves(layers)
    return {f"{name}.{part}": a for name, entry in leaves for part, a in _arrays(entry)}


def _arrays(entry: Any) -> Iterator[tuple[str, mx.array]]:
    if isinstance(entry, ArraysCache):
        yield from ((str(at), array) for at, array in enumerate(entry.cache) if array is not None)
        return
    for name in ("keys", "values"):
        value = getattr(entry, name)
        if isinstance(value, tuple | list):
            yield from ((f"{name}.{at}", _used(entry, array)) for at, array in enumerate(value))
        elif value is not None:
            yield name, _used(entry, value)


def _used(entry: Any, array: mx.array) -> mx.array:
    if isinstance(entry, RotatingKVCache):  # the oldest tokens may have been overwritten in place
        ordered: mx.array = entry._temporal_order(array)
        return ordered
    return array[:, :, : entry.offset]


def layers_of(fresh: Layers, arrays: Arrays, length: int) -> Layers:
    """Returns layers like the fresh ones, which are empty, with the arrays of so many tokens."""
    layers = deepcopy(fresh)
    for layer, entry in _leaves(layers):
        if layer_arrays := _under(
            layer, arrays
        ):  # else the model has no use for this layer's cache
            _fill(entry, layer_arrays, length)
    return layers


def _fill(entry: Any, arrays: Arrays, length: int) -> None:
    if isinstance(entry, ArraysCache):
        entry.cache = [arrays.get(str(at)) for at in range(len(entry.cache))]
        return
    for name in ("keys", "values"):
        several = tuple(_under(name, arrays).values())
        setattr(entry, name, several or arrays[name])
    entry.offset = length
    if isinstance(entry, RotatingKVCache):
        entry._idx = entry.keys.shape[AXIS]


def _under(prefix: str, arrays: Mapping[str, T]) -> dict[str, T]:
    start = f"{prefix}."
    return {name.removeprefix(start): a for name, a in arrays.items() if name.startswith(start)}


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The dtype and shape that a tensor of a file must have. None stands for the tokens."""

    dtype: str
    shape: tuple[int | None, ...]

    def fits(self, dtype: str, shape: tuple[int, ...]) -> bool:
        pairs = zip(self.shape, shape, strict=False)
        same = all(own in (None, size) for own, size in pairs)
        return dtype == self.dtype and len(shape) == len(self.shape) and same

    def of_tokens(self, tokens: int) -> tuple[int, ...]:
        return tuple(tokens if size is None else size for size in self.shape)

    def nbytes(self, tokens: int) -> int:
        return SIZES[self.dtype] * prod(self.of_tokens(tokens))


@dataclass(frozen=True)
class CacheLayout:
    """The shape of a model's caches."""

    fresh: Cache
    """The empty cache of a row."""
    cut: Mapping[str, TensorShape]
    """The arrays of the layers that can always be cut back, by the layer's number and name."""
    rest: Mapping[str, TensorShape]
    """The arrays of the other layers."""

    @property
    def cut_layers(self) -> Layers:
        return split(self.fresh)[0]

    @property
    def rest_layers(self) -> Layers:
        return split(self.fresh)[1]

    def describe(self) -> str:
        return repr([[type(entry).__name__ for entry in self.fresh], self.cut, self.rest])

    def most_bytes(self, file: PromptFile, block: int) -> int:
        """Returns the most bytes that the file may have."""
        sizes = [shape.nbytes(block) for shape in self.cut.values()]
        sizes += [shape.nbytes(file.length) for shape in self.rest.values()]
        return sum(sizes) + HEADER_BYTES + 4 * block

    def fits(
        self, file: PromptFile, tokens: int, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> bool:
        """Whether a file that has so many of its prompt's tokens can have these tensors."""
        wanted = {**self.cut, **self.rest} if file.tail else self.cut
        if shapes.keys() != wanted.keys():
            return False
        if not all(shape.fits(*shapes[name]) for name, shape in wanted.items()):
            return False
        sizes = {name: shape[AXIS] for name, (_, shape) in shapes.items() if len(shape) > AXIS}
        states = _leaves(self.rest_layers if file.tail else {})
        return all(sizes[name] == tokens for name in self.cut) and all(
            _fits(entry, set(_under(layer, sizes).values()), file.length) for layer, entry in states
        )


def _fits(fresh: Any, sizes: set[int], length: int) -> bool:
    """Whether an entry has such sizes along the axis of tokens after `length` tokens."""
    match fresh:
        case ArraysCache():
            return True
        case RotatingKVCache():
            window = min(length, fresh.max_size)
            return len(sizes) < 2 and all(window <= size <= length for size in sizes)
    return sizes <= {length}


def layout_of(network: nn.Module) -> CacheLayout | None:
    """None if some of the model's caches can't be kept on disk. Nothing is computed."""
    fresh, used = make_caches(network), make_caches(network)
    if not all(type(e) in (*GROWING, ArraysCache) for _, e in _leaves(dict(enumerate(fresh)))):
        return None
    network(mx.zeros((1, 2), mx.int32), cache=used)
    leaves = (_leaves(dict(enumerate(cache))) for cache in (fresh, used))
    for (_, empty), (_, filled) in zip(*leaves, strict=True):
        if isinstance(empty, QuantizedKVCache):  # it settles this with its first keys and values
            empty.group_size = filled.group_size
    if any(array.dtype not in NAMES for array in arrays_of(dict(enumerate(used))).values()):
        return None
    cut, rest = map(_shapes, split(used))
    return CacheLayout(fresh, cut, rest)


def _shapes(layers: Layers) -> dict[str, TensorShape]:
    return {
        f"{layer}.{name}": TensorShape(
            NAMES[array.dtype],
            tuple(
                None if type(entry) in GROWING and axis == AXIS else size
                for axis, size in enumerate(array.shape)
            ),
        )
        for layer, entry in _leaves(layers)
        for name, array in _arrays(entry)
    }


log = logging.getLogger("mlx_server.engine")

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""System errors that do not show that the file is damaged."""


@dataclass
class StoredPrompt:
    length: int
    cut: Tensors
    """The arrays of the layers that can always be cut back, for all tokens."""
    rest: Tensors
    nbytes: int = 0
    """How many bytes were read."""


def files_of(folder: PromptFolder, layout: CacheLayout, names: PromptNames) -> list[PromptFile]:
    return folder.longest(names, blocks=bool(layout.cut), states=bool(layout.rest_layers))


def load(
    folder: PromptFolder, layout: CacheLayout, names: PromptNames, least: int
) -> StoredPrompt | None:
    """Reads the longest prefix that is on disk and undamaged; None if it has fewer than `least`
    tokens.

    A damaged file is removed, and the prefix without it is read instead.
    """
    while (files := files_of(folder, layout, names)) and files[-1].length >= least:
        length = files[-1].length
        cut: Tensors = {
            name: (shape.dtype, np.empty(shape.of_tokens(length), WIDTHS[SIZES[shape.dtype]]))
            for name, shape in layout.cut.items()
        }
        stored = StoredPrompt(length, cut, {})
        try:
            for file in files:
                _take(stored, folder, layout, names, file)
        except DamagedFile as error:
            log.warning("a file of the prompt cache %s and was removed", error)
            folder.remove(file)
        except FileNotFoundError:  # removed by the owner
            folder.scan()
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            log.warning("a file of the prompt cache can't be read: %s", error.strerror)
            folder.remove(file)
        else:
            folder.touch(files)
            return stored
    return None


def _take(
    stored: StoredPrompt,
    folder: PromptFolder,
    layout: CacheLayout,
    names: PromptNames,
    file: PromptFile,
) -> None:
    begin = file.begin(folder.block)
    most = layout.most_bytes(file, folder.block)
    tensors, ids = read(folder.place(file), file, most)
    if not np.array_equal(ids, names.ids[begin : file.length]):
        raise DamagedFile("has other tokens than its name says")
    shapes = {name: (dtype, items.shape) for name, (dtype, items) in tensors.items()}
    if not layout.fits(file, len(ids), shapes):
        raise DamagedFile("has other arrays than the model's caches")
    for name in layout.cut:
        stored.cut[name][1][:, :, begin : file.length] = tensors.pop(name)[1]
    stored.rest |= tensors
    stored.nbytes += folder.size_of(file)
