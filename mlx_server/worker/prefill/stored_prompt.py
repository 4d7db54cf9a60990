"""The cached prompts in files: which entries of a model's caches can be written, and entries made
from files.

Only entries of the classes in a table can be. The class of an entry always comes from the model,
never from a file. Files are read into arrays of NumPy, in a thread that does not use MLX.
"""

import errno
import logging
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_server.models.weights_files import SIZES
from mlx_server.prompt_files.contents import (
    HEADER_BYTES,
    WIDTHS,
    Bits,
    Contents,
    DamagedFile,
    TensorShape,
    read,
)
from mlx_server.prompt_files.folder import FoundFiles, PromptFolder
from mlx_server.prompt_files.names import Ids, PromptFile, common_length, digest, links_of
from mlx_server.worker.kv_caches import QuantizedRow, make_caches
from mlx_server.worker.mlx_lm_internals import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_server.worker.prefill.prompt_cache import Cache, Layers, split

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


log = logging.getLogger("mlx_server.engine")

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""System errors that do not show that the file is damaged."""

Tensors = dict[str, tuple[str, Bits]]
"""The type and the items of each tensor, by name."""


@dataclass(frozen=True)
class StoredPrompt:
    length: int
    cut: Tensors
    """The arrays of the layers that can always be cut back, for all tokens."""
    rest: Tensors
    numbers: Mapping[str, Any]
    """The numbers of the other layers, by the layer's number."""
    nbytes: int
    """How many bytes were read."""


def found_files(
    folder: PromptFolder, layout: CacheLayout, group: str, ids: Ids
) -> FoundFiles | None:
    links = links_of(ids, folder.block)
    blocks, states = bool(layout.cut), layout.has_states
    return folder.longest(group, ids, links, blocks=blocks, states=states)


def load(
    folder: PromptFolder, layout: CacheLayout, group: str, ids: Ids, least: int
) -> StoredPrompt | None:
    """Reads the longest prefix that is on disk and undamaged; None if it has fewer than `least`
    tokens.

    A damaged file is removed, and the prefix without it is read instead.
    """
    while (found := found_files(folder, layout, group, ids)) and found.most >= least:
        stored = _Assembly(folder, layout, ids, found)
        if stored.complete():
            if stored.length < least:
                return None
            folder.note(group, ids, links_of(ids, folder.block))
            folder.touch(found.files)
            return stored.result()
    return None


class _Assembly:
    """The arrays of one prompt while its files are read."""

    def __init__(
        self, folder: PromptFolder, layout: CacheLayout, ids: Ids, found: FoundFiles
    ) -> None:
        self._folder, self._layout, self._ids, self._found = folder, layout, ids, found
        self._cut: Tensors = {
            name: (shape.dtype, np.empty(_whole(shape.shape, found.most), _width(shape.dtype)))
            for name, shape in layout.cut.items()
        }
        self.length = 0
        self._rest: Tensors = {}
        self._numbers: Mapping[str, Any] = {}
        self._nbytes = 0

    def complete(self) -> bool:
        """Reads the files one after the other; False if one can't be used, which is removed."""
        for file in self._found.files:
            try:
                self._take(file)
            except DamagedFile as error:
                log.warning("a file of the prompt cache %s and was removed", error)
                self._folder.remove(file)
                return False
            except FileNotFoundError:  # removed by the owner
                self._folder.scan()
                return False
            except OSError as error:
                if error.errno in SHORTAGES:
                    raise
                log.warning("a file of the prompt cache can't be read: %s", error.strerror)
                self._folder.remove(file)
                return False
        return True

    def result(self) -> StoredPrompt:
        end = self.length
        cut = {name: (dtype, items[:, :, :end]) for name, (dtype, items) in self._cut.items()}
        return StoredPrompt(end, cut, self._rest, self._numbers, self._nbytes)

    def _take(self, file: PromptFile) -> None:
        block, layout = self._folder.block, self._layout
        begin = file.length - file.length % block if file.tail else file.length - block
        most = layout.most_bytes(block, file.length) + HEADER_BYTES + 4 * block
        contents = read(self._folder.place(file), file, most)
        end = begin + self._common(file, begin, contents.ids)
        shapes = {n: (dtype, items.shape) for n, (dtype, items) in contents.tensors.items()}
        if not shapes_fit({**layout.cut, **layout.rest} if file.tail else layout.cut, shapes):
            raise DamagedFile("has other arrays than the model's caches")
        for name in layout.cut:
            items = contents.tensors[name][1]
            if items.shape[AXIS] != file.length - begin:
                raise DamagedFile("has arrays of another length")
            self._cut[name][1][:, :, begin:end] = items[:, :, : end - begin]
        if file.tail:
            self._take_rest(contents, file.length)
        self.length = end
        self._nbytes += self._folder.size_of(file)

    def _common(self, file: PromptFile, begin: int, ids: Ids) -> int:
        """Returns how many of the file's tokens the prompt has too: of the final file perhaps not
        all."""
        wanted = self._ids[begin : file.length]
        if not np.array_equal(ids, wanted) and not self._may_differ(file, begin, ids):
            raise DamagedFile("has other tokens than its name says")
        if file.tail:
            self._folder.learn_tail(file, ids.copy())
        return common_length(ids, wanted)

    def _may_differ(self, file: PromptFile, begin: int, ids: Ids) -> bool:
        """Whether the tokens are the file's own, and it follows the prompt's last whole block."""
        if len(ids) != file.length - begin or file.length <= self._found.length:
            return False
        before = file.link if file.tail else links_of(self._ids[:begin], self._folder.block)[-1]
        return digest(before.encode(), ids.tobytes()) == (file.tail or file.link)

    def _take_rest(self, contents: Contents, length: int) -> None:
        numbers = contents.about.get("rest")
        rest = {
            name: tensor
            for name, tensor in contents.tensors.items()
            if name not in self._layout.cut
        }
        fresh = self._layout.rest_layers
        if not isinstance(numbers, dict) or numbers.keys() != {str(n) for n in fresh}:
            raise DamagedFile("has the numbers of other layers")
        shapes = {name: items.shape for name, (_, items) in rest.items()}
        for layer, entry in fresh.items():
            check_numbers(entry, rest_sizes(layer, shapes), numbers[str(layer)], length)
        self._rest, self._numbers = rest, numbers


def _whole(shape: tuple[int | None, ...], length: int) -> tuple[int, ...]:
    return tuple(length if n is None else n for n in shape)


def _width(dtype: str) -> Any:
    return WIDTHS[SIZES[dtype]]
