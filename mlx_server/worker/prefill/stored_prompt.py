"""Reads the files of a prompt into arrays of NumPy, in a thread that does not use MLX."""

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_server.checkpoints.weights_files import SIZES
from mlx_server.prompt_files.contents import (
    HEADER_BYTES,
    WIDTHS,
    Bits,
    Contents,
    DamagedFile,
    read,
)
from mlx_server.prompt_files.folder import FoundFiles, PromptFolder
from mlx_server.prompt_files.names import Ids, PromptFile, common_length, digest, links_of
from mlx_server.worker.prefill.cache_layout import (
    AXIS,
    CacheLayout,
    check_numbers,
    rest_sizes,
    shapes_fit,
)

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
