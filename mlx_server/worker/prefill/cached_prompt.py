"""One cached prompt, and the lengths at which it can be continued.

The layers of a KV cache can be cut back to any shorter length. Recurrent states and sliding
windows can't: of these layers a cached prompt keeps snapshots, and it can be continued only where
it has one.
"""

import time
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlx_server import limits
from mlx_server.engine.messages import SHORTEST_STORED
from mlx_server.prompt_files.names import Ids, common_length
from mlx_server.worker.mlx_lm_internals import ArraysCache, CacheList, KVCache, QuantizedKVCache
from mlx_server.worker.replay_model import ReplayCache

Cache = list[Any]
"""One entry of mlx-lm's cache for each layer."""

Layers = dict[int, Any]
"""Some of a cache's entries, by the number of the layer."""


def ids_of(tokens: Iterable[int]) -> Ids:
    return np.fromiter(tokens, np.uint32)


def beginning_of(tokens: Ids) -> bytes:
    return tokens[:SHORTEST_STORED].tobytes()


def can_always_be_cut(entry: Any) -> bool:
    """Whether this entry of a cache can be trimmed to any length, however long it becomes."""
    if isinstance(entry, CacheList):
        return all(map(can_always_be_cut, entry.caches))
    return isinstance(entry, KVCache | QuantizedKVCache | ReplayCache)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The layers that can't always be cut back, as they were after `length` tokens.

    Cached prompts with the same beginning share it."""

    length: int
    layers: Layers

    @cached_property
    def nbytes(self) -> int:
        return sum(int(entry.nbytes) for entry in self.layers.values())

    def reaches(self, length: int) -> int:
        """Returns how many of the first `length` tokens it can restore."""
        if self.length <= length:
            return self.length
        return length if all(entry.is_trimmable() for entry in self.layers.values()) else 0

    def restored(self, length: int) -> Layers:
        return _trimmed(self.layers, self.length - length)


@dataclass(eq=False)
class CachedPrompt:
    key: str
    tokens: Ids
    layers: Layers | None
    """The layers that can always be cut back; None while the prompt is still being computed."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """The snapshots by their length."""
    continued_from: int = 0
    """The length from which the conversation's next prompt is expected to differ."""
    shared: int = 0
    """The length of its tools and system prompt, with which other conversations begin too."""
    disk_length: int = 0
    """The number of the first tokens that may be written to disk."""
    is_saved: bool = False
    """Whether there is nothing left to write to disk."""
    since: float = field(default_factory=time.monotonic)

    @property
    def is_unsaved(self) -> bool:
        """Whether it may be written to disk, and is not."""
        is_whole = self.layers is not None and self.disk_length >= SHORTEST_STORED
        return is_whole and not self.is_saved

    @cached_property
    def beginning(self) -> bytes:
        """The beginning that prompts have in common if either can be of use to the other."""
        return beginning_of(self.tokens)

    @cached_property
    def nbytes(self) -> int:
        """Bytes without the snapshots."""
        return sum(int(entry.nbytes) for entry in (self.layers or {}).values())

    def reaches(self, tokens: Ids) -> tuple[int, Snapshot | None]:
        """Returns the length of the longest prefix of `tokens` that it can restore, and how."""
        if self.layers is None:
            return 0, None
        common = common_length(self.tokens, tokens)
        nearest = max(self.snapshots.values(), key=lambda each: each.reaches(common))
        length = nearest.reaches(common)
        return length, nearest if length else None

    def restored(self, length: int, snapshot: Snapshot) -> Cache:
        """Returns a copy of the cache as it was after `length` tokens. Arrays are shared until one
        side writes."""
        assert self.layers is not None
        cut = _trimmed(self.layers, len(self.tokens) - length)
        both = cut | snapshot.restored(length)
        return [both[layer] for layer in sorted(both)]

    def inherit(self, other: "CachedPrompt") -> bool:
        """Takes over the other prompt's snapshots of the common beginning. Returns whether this
        prompt makes the other one superfluous."""
        common = common_length(self.tokens, other.tokens)
        theirs = {n: each for n, each in other.snapshots.items() if n <= common}
        self.snapshots = theirs | self.snapshots
        self.shared = max(self.shared, other.shared if other.shared <= common else 0)
        self.disk_length = max(self.disk_length, min(common, other.disk_length))
        is_prefix = common == len(other.tokens)
        return is_prefix and (self.layers is not None or other.layers is None)

    def continues(self, other: "CachedPrompt") -> bool:
        """Whether this is a later turn of the other one's conversation."""
        start = other.continued_from
        return 0 < start <= common_length(self.tokens, other.tokens)

    def snapshots_until(self, length: int) -> "CachedPrompt":
        """Returns the snapshots of the first `length` tokens, for a prompt that continues them."""
        taken = {n: each for n, each in self.snapshots.items() if n <= length and each.layers}
        return CachedPrompt(self.key, self.tokens[:length].copy(), None, taken, shared=self.shared)

    def cut_back(self, length: int, snapshots: Iterable[Snapshot]) -> None:
        """Frees everything but what these snapshots need of the first `length` tokens, layer by
        layer: at most one layer is in memory twice."""
        assert self.layers is not None
        surplus = len(self.tokens) - length
        self.snapshots = {each.length: each for each in snapshots}
        self.tokens = self.tokens[:length].copy()
        for layer in self.layers if surplus else ():
            (entry,) = _trimmed({0: self.layers[layer]}, surplus).values()
            _shrink_to_use(entry)
            self.layers[layer] = entry
        self.__dict__.pop("nbytes", None)  # cached, and lower now

    def thin(self, most_bytes: int) -> None:
        """Drops snapshots until their number and bytes are within the limits."""
        sizes = {n: each.nbytes for n, each in self.snapshots.items()}
        for length in superfluous(sizes, most_bytes, (self.shared, self.continued_from)):
            del self.snapshots[length]


def superfluous(
    snapshots: Mapping[int, int], most_bytes: int, expected: Iterable[int]
) -> list[int]:
    """Returns the snapshots to drop so that the rest is within the limits: at each time the one
    whose loss leaves the shortest gap between its neighbours. Those with which other prompts are
    expected to begin are kept longer than the rest, and the longest two the longest.

    snapshots: the bytes of each by its length. expected: the length of the system prompt, and the
    length from which the conversation's next prompt is expected to differ.
    """
    left, dropped = dict(snapshots), []
    wanted = {max((n for n in left if n <= length), default=0) for length in expected}
    while len(left) > 1 and (
        len(left) > limits.PROMPT_SNAPSHOTS or sum(left.values()) > most_bytes
    ):
        places = [0, *sorted(left)]
        inner = [at for at in range(1, len(places) - 2) if places[at] not in wanted] or [1]
        least = min(inner, key=lambda at: places[at + 1] - places[at - 1])
        dropped.append(places[least])
        del left[places[least]]
    return dropped


def split(cache: Cache) -> tuple[Layers, Layers]:
    """Returns the layers that can always be cut back, and the others."""
    cut = {layer: entry for layer, entry in enumerate(cache) if can_always_be_cut(entry)}
    return cut, {layer: entry for layer, entry in enumerate(cache) if layer not in cut}


def detach(entry: Any) -> None:
    """Detaches a recurrent state from its batch: it is a slice, which would keep the states of all
    rows in memory. Other caches are copied when they are extracted."""
    match entry:
        case ArraysCache():
            entry.cache = [None if a is None else mx.contiguous(a) for a in entry.cache]
        case CacheList():
            for inner in entry.caches:
                detach(inner)


def _trimmed(layers: Layers, tokens: int) -> Layers:
    copies = {layer: deepcopy(entry) for layer, entry in layers.items()}
    for entry in copies.values():
        if tokens:
            entry.trim(tokens)
    return copies


def _shrink_to_use(entry: Any) -> None:
    """Frees the memory of the tokens after the entry's length."""
    match entry:
        case CacheList():
            for inner in entry.caches:
                _shrink_to_use(inner)
        case KVCache() | QuantizedKVCache():
            arrays = entry.keys, entry.values
            used = tree_map(lambda a: mx.contiguous(a[..., : entry.offset, :]), arrays)
            mx.eval(used)
            entry.keys, entry.values = used
