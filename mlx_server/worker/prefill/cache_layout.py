"""The shape of a model's caches: which entries can be written to files, and entries made from
files.

Only entries of the classes in a table can be. The class of an entry always comes from the model,
never from a file.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.checkpoints.weights_files import SIZES
from mlx_server.prompt_files.contents import DamagedFile, TensorShape
from mlx_server.worker.mlx_lm_internals import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_server.worker.prefill.cached_prompt import Cache, Layers, split
from mlx_server.worker.quantized_kv import QuantizedRow, make_caches

Arrays = dict[str, mx.array]

NUMBERS: Mapping[type, tuple[str, ...]] = {
    KVCache: ("offset",),
    QuantizedKVCache: ("offset", "group_size", "bits"),
    QuantizedRow: ("offset", "group_size", "bits"),
    RotatingKVCache: ("offset", "keep", "max_size", "_idx"),
    ArraysCache: (),
}
"""The classes that are kept on disk, and their attributes that are numbers."""

GROWING = (KVCache, QuantizedKVCache, RotatingKVCache)
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


def is_known(entry: Any) -> bool:
    if type(entry) is CacheList:
        return all(map(is_known, entry.caches))
    return type(entry) in NUMBERS


def arrays_of(entry: Any) -> Arrays:
    """Returns the arrays of an entry by name, without the part that is allocated but not used."""
    if type(entry) is CacheList:
        inner = [(at, arrays_of(each)) for at, each in enumerate(entry.caches)]
        return {f"{at}.{name}": array for at, found in inner for name, array in found.items()}
    if type(entry) is ArraysCache:
        return {str(at): array for at, array in enumerate(entry.cache) if array is not None}
    found = dict(_keys_and_values(entry))
    if type(entry) is RotatingKVCache:
        return found
    return {name: array[:, :, : entry.offset] for name, array in found.items()}


def _keys_and_values(entry: Any) -> Iterator[tuple[str, mx.array]]:
    for name in ("keys", "values"):
        value = getattr(entry, name)
        if isinstance(value, tuple | list):
            yield from ((f"{name}.{at}", array) for at, array in enumerate(value))
        elif value is not None:
            yield name, value


def numbers_of(entry: Any) -> list[Any]:
    if type(entry) is CacheList:
        return [numbers_of(inner) for inner in entry.caches]
    return [getattr(entry, name) for name in NUMBERS[type(entry)]]


def entry_of(fresh: Any, arrays: Arrays, numbers: list[Any]) -> Any:
    """Returns an entry like `fresh`, which is empty, with these arrays and numbers."""
    entry = copy(fresh)
    if type(entry) is CacheList:
        parts = enumerate(zip(fresh.caches, numbers, strict=True))
        entry.caches = tuple(
            entry_of(each, _under(str(at), arrays), own) for at, (each, own) in parts
        )
    elif type(entry) is ArraysCache:
        entry.cache = [arrays.get(str(at)) for at in range(len(fresh.cache))]
    else:
        for name in ("keys", "values"):
            several = tuple(_under(name, arrays).values())
            setattr(entry, name, several or arrays.get(name))
        for name, number in zip(NUMBERS[type(entry)], numbers, strict=True):
            setattr(entry, name, number)
    return entry


def _under(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    start = f"{prefix}."
    return {n.removeprefix(start): found for n, found in arrays.items() if n.startswith(start)}


def numbers_after(fresh: Any, arrays: Mapping[str, Any], length: int) -> list[Any]:
    """Returns the numbers of an entry that can always be cut back, after `length` tokens."""
    if type(fresh) is CacheList:
        inner = enumerate(fresh.caches)
        return [numbers_after(each, _under(str(at), arrays), length) for at, each in inner]
    _, *others = numbers_of(fresh)
    return [length if arrays else fresh.offset, *others]


def layers_of(fresh: Layers, arrays: Arrays, numbers: Mapping[int, list[Any]]) -> Layers:
    return {n: entry_of(each, _under(str(n), arrays), numbers[n]) for n, each in fresh.items()}


def cut_layers_of(fresh: Layers, arrays: Arrays, length: int) -> Layers:
    own = {n: numbers_after(each, _under(str(n), arrays), length) for n, each in fresh.items()}
    return layers_of(fresh, arrays, own)


def check_numbers(fresh: Any, sizes: Mapping[str, int], numbers: Any, length: int) -> None:
    """Raises DamagedFile unless these are the numbers of an entry after `length` tokens.

    sizes: of each array, along the axis of tokens.
    """
    if type(fresh) is CacheList:
        if not isinstance(numbers, list) or len(numbers) != len(fresh.caches):
            raise DamagedFile("has invalid numbers")
        for at, (inner, own) in enumerate(zip(fresh.caches, numbers, strict=True)):
            check_numbers(inner, _under(str(at), sizes), own, length)
    elif not _are_valid(fresh, set(sizes.values()), numbers, length):
        raise DamagedFile("has invalid numbers")


def _are_valid(fresh: Any, sizes: set[int], numbers: Any, length: int) -> bool:
    if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
        return False
    match fresh:
        case ArraysCache():
            return numbers == []
        case _ if not sizes:  # the model has no use for this layer's cache
            return numbers == numbers_of(fresh)
        case KVCache():
            return numbers == [length] and sizes == {length}
        case QuantizedKVCache():
            return numbers == [length, fresh.group_size, fresh.bits] and sizes == {length}
        case _:
            size = min(sizes)
            is_full = min(length, fresh.max_size) <= size == max(sizes)
            own = [length, fresh.keep, fresh.max_size]
            return is_full and numbers[:3] == own and 0 < numbers[3] <= size and len(numbers) == 4


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
    def has_states(self) -> bool:
        return bool(self.rest_layers)

    @property
    def cut_layers(self) -> Layers:
        return split(self.fresh)[0]

    @property
    def rest_layers(self) -> Layers:
        return split(self.fresh)[1]

    def describe(self) -> str:
        return repr([[type(entry).__name__ for entry in self.fresh], self.cut, self.rest])

    def most_bytes(self, cut_tokens: int, rest_tokens: int) -> int:
        """Returns the most bytes of the arrays of so many tokens."""
        sizes = [(shape, cut_tokens) for shape in self.cut.values()]
        sizes += [(shape, rest_tokens) for shape in self.rest.values()]
        return sum(
            SIZES[shape.dtype] * prod(tokens if n is None else n for n in shape.shape)
            for shape, tokens in sizes
        )


def layout_of(network: nn.Module) -> CacheLayout | None:
    """None if some of the model's caches can't be kept on disk. Nothing is computed."""
    fresh = make_caches(network)
    if not all(map(is_known, fresh)):
        return None
    used = make_caches(network)
    network(mx.zeros((1, 2), mx.int32), cache=used)
    for empty, filled in zip(fresh, used, strict=True):
        _take_group_sizes(empty, filled)
    layers = dict(enumerate(used))
    arrays = named_arrays(layers)
    if any(array.dtype not in NAMES for array in arrays.values()):
        return None
    shapes = {name: _shape(layers, name, array) for name, array in arrays.items()}
    cut, rest = (named_arrays(some) for some in split(used))
    return CacheLayout(
        fresh,
        cut={name: shapes[name] for name in cut},
        rest={name: shapes[name] for name in rest},
    )


def _take_group_sizes(fresh: Any, used: Any) -> None:
    """Copies the group size of a quantized cache, which it settles only with its first keys and
    values."""
    match fresh:
        case CacheList():
            for empty, filled in zip(fresh.caches, used.caches, strict=True):
                _take_group_sizes(empty, filled)
        case QuantizedKVCache():
            fresh.group_size = used.group_size


def named_arrays(layers: Layers) -> Arrays:
    return {
        f"{layer}.{name}": array
        for layer, entry in layers.items()
        for name, array in arrays_of(entry).items()
    }


def _shape(layers: Layers, name: str, array: mx.array) -> TensorShape:
    layer, *path = name.split(".")
    entry = layers[int(layer)]
    for part in path:
        if type(entry) is CacheList:
            entry = entry.caches[int(part)]
    grows = isinstance(entry, GROWING)
    sizes = (None if grows and axis == AXIS else n for axis, n in enumerate(array.shape))
    return TensorShape(NAMES[array.dtype], tuple(sizes))


def shapes_fit(wanted: Mapping[str, TensorShape], found: Mapping[str, Any]) -> bool:
    """found: the type and shape of each tensor by name."""
    return wanted.keys() == found.keys() and all(
        shape.fits(*found[name]) for name, shape in wanted.items()
    )


def rest_sizes(layer: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the sizes of a layer's arrays along the axis of tokens, for `check_numbers`."""
    own = _under(str(layer), shapes)
    return {name: shape[AXIS] if len(shape) > AXIS else 0 for name, shape in own.items()}
