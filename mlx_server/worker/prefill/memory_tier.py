"""The KV caches of earlier prompts in memory, by the key of what computed them.

A conversation takes the memory of one cache: a prompt that continues a cached one to its end takes
its place, and prompts with the same beginning share the snapshots of it.

The layers of a KV cache can be cut back to any shorter length. Recurrent states and sliding
windows can't: of these layers a cached prompt keeps snapshots, and it can be continued only where
it has one.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from mlx_server import limits
from mlx_server.engine.messages import SHORTEST_STORED
from mlx_server.prompt_files import Ids, common_length
from mlx_server.worker.mlx_lm_internals import ArraysCache, CacheList, KVCache, QuantizedKVCache
from mlx_server.worker.ragged_caches import leaves
from mlx_server.worker.replay_model import ReplayCache

Key = tuple[str | float | None, ...]
"""What computes a prompt, and for whom: the model, the adapter, its scale and the cache scope."""

Cache = list[Any]
"""One entry of mlx-lm's cache for each layer."""

Layers = dict[int, Any]
"""Some of a cache's entries, by the number of the layer."""


def ids_of(tokens: Iterable[int]) -> Ids:
    return np.fromiter(tokens, np.uint32)


def can_always_be_cut(entry: Any) -> bool:
    """Whether this entry of a cache can be trimmed to any length, however long it becomes."""
    if isinstance(entry, CacheList):
        return all(map(can_always_be_cut, entry.caches))
    return isinstance(entry, KVCache | QuantizedKVCache | ReplayCache)


def split(cache: Cache) -> tuple[Layers, Layers]:
    """Returns the layers that can always be cut back, and the others."""
    cut = {layer: entry for layer, entry in enumerate(cache) if can_always_be_cut(entry)}
    return cut, {layer: entry for layer, entry in enumerate(cache) if layer not in cut}


def bytes_of(layers: Layers) -> int:
    return sum(int(entry.nbytes) for entry in layers.values())


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The layers that can't always be cut back, as they were after `length` tokens.

    Cached prompts with the same beginning share it."""

    length: int
    layers: Layers

    @cached_property
    def nbytes(self) -> int:
        return bytes_of(self.layers)

    def reaches(self, length: int) -> int:
        """Returns how many of the first `length` tokens it can restore."""
        if self.length <= length:
            return self.length
        return length if all(entry.is_trimmable() for entry in self.layers.values()) else 0


@dataclass(eq=False)
class CachedPrompt:
    key: Key
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
    gives_way: bool = False
    """Whether it is a batch's, which takes no room of others and is dropped first."""
    since: float = field(default_factory=time.monotonic)
    used: int = 0
    """The number of its latest use; numbers increase."""

    @property
    def is_unsaved(self) -> bool:
        """Whether it may be written to disk, and is not."""
        is_whole = self.layers is not None and self.disk_length >= SHORTEST_STORED
        return is_whole and not self.is_saved

    @property
    def numbers(self) -> list[int]:
        """What an index compares of it: see PromptIndex."""
        cut = [n for n, each in self.snapshots.items() if each.reaches(n - 1)]
        states = [length for length, each in self.snapshots.items() if each.layers]
        place = min(len(self.tokens), self.continued_from or len(self.tokens))
        return [self.used, place, self.layers is not None, max(cut, default=0), *states]

    @cached_property
    def nbytes(self) -> int:
        """Bytes without the snapshots."""
        return bytes_of(self.layers or {})

    def bytes_until(self, length: int) -> int:
        """Returns the bytes of the first `length` tokens, with the snapshots among them."""
        snapshots = sum(each.nbytes for n, each in self.snapshots.items() if n <= length)
        return self.nbytes * length // len(self.tokens) + snapshots

    def reaches(self, common: int) -> tuple[int, Snapshot | None]:
        """Returns how many of its first `common` tokens it can restore at most, and how."""
        if self.layers is None:
            return 0, None
        nearest = max(self.snapshots.values(), key=lambda each: each.reaches(common))
        length = nearest.reaches(common)
        return length, nearest if length else None

    def restored(self, length: int, snapshot: Snapshot) -> Cache:
        """Returns a copy of the cache as it was after `length` tokens. Arrays are shared until one
        side writes."""
        assert self.layers is not None
        cut = _trimmed(self.layers, len(self.tokens) - length)
        both = cut | _trimmed(snapshot.layers, snapshot.length - length)
        return [both[layer] for layer in sorted(both)]

    def inherit(self, other: "CachedPrompt", common: int) -> bool:
        """Takes over the other prompt's snapshots of the common beginning. Returns whether this
        prompt makes the other one superfluous."""
        theirs = {n: each for n, each in other.snapshots.items() if n <= common}
        self.snapshots = theirs | self.snapshots
        self.shared = max(self.shared, other.shared if other.shared <= common else 0)
        self.disk_length = max(self.disk_length, min(common, other.disk_length))
        is_prefix = common == len(other.tokens)
        return is_prefix and (self.layers is not None or other.layers is None)

    def goes_on(self, common: int) -> bool:
        """Whether a prompt with this beginning is a later turn of its conversation."""
        return common >= SHORTEST_STORED and 0 < self.continued_from <= common

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


COMMON, USED, PLACE, IS_WHOLE, CUT, STATES = range(6)


class PromptIndex:
    """Cached prompts in the order of their tokens, and how many first tokens each shares with the
    one before it. So two comparisons give what a prompt shares with each of them: the number falls
    with the distance from its place.

    What prompts can restore and pass on is compared in columns too: hundreds may share as much.
    """

    def __init__(self) -> None:
        self._prompts: list[CachedPrompt] = []
        self._sorted: list[bytes] = []
        """The tokens of each, as bytes that are in the same order."""
        self._numbers = np.empty((0, STATES), np.int64)
        """Of each the tokens in common, its latest use, the number of tokens with which a new
        prompt takes its place, whether it is wholly computed, its longest snapshot that can be cut
        to any length, and the lengths of all that have a state: a column for each of the most."""

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: CachedPrompt) -> None:
        at, before, after = self._place(prompt.tokens)
        self._prompts.insert(at, prompt)
        self._sorted.insert(at, _sortable(prompt.tokens))
        numbers = [before, *prompt.numbers]
        missing = len(numbers) - self._numbers.shape[1]
        if missing > 0:
            self._numbers = np.pad(self._numbers, ((0, 0), (0, missing)))
        self._numbers = np.insert(self._numbers, at, numbers + [0] * -missing, axis=0)
        self._numbers[at + 1 : at + 2, COMMON] = after

    def remove(self, prompt: CachedPrompt) -> None:
        at = self._prompts.index(prompt, bisect_left(self._sorted, _sortable(prompt.tokens)))
        least = self._numbers[at : at + 2, COMMON].min()
        del self._prompts[at], self._sorted[at]
        self._numbers = np.delete(self._numbers, at, axis=0)
        self._numbers[at : at + 1, COMMON] = least

    def nearest(self, tokens: Ids) -> tuple[int, CachedPrompt] | None:
        """Returns the prompt that can restore the most of this one, and how many tokens they share;
        of several the one that shares the most, and of these the one used most recently."""
        if not self._prompts:
            return None
        common = self._shared(tokens)
        cut, states = np.minimum(self._numbers[:, CUT], common), self._states(common)
        reached = np.maximum(cut, states.max(axis=1, initial=0)) * self._numbers[:, IS_WHOLE]
        at = np.lexsort((self._numbers[:, USED], common, reached))[-1]
        return int(common[at]), self._prompts[at]

    def useful(self, tokens: Ids) -> list[tuple[int, CachedPrompt]]:
        """Returns the prompts from which a new one takes something over, each with the number of
        tokens that they share: its place as one that ends or goes on there, or a state. Of those
        with states of one length, which are equal, it is the first."""
        common = self._shared(tokens)
        is_useful = common >= np.maximum(self._numbers[:, PLACE], SHORTEST_STORED)
        states = self._states(common)
        lengths, first = np.unique(states, return_index=True)
        is_useful[first[lengths >= SHORTEST_STORED] // max(1, states.shape[1])] = True
        return [(int(common[at]), self._prompts[at]) for at in np.flatnonzero(is_useful)]

    def _states(self, common: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the lengths of the states within the common tokens of each prompt, and zeros."""
        states = self._numbers[:, STATES:]
        return np.where(states <= common[:, None], states, 0)

    def shared(self, tokens: Ids) -> int:
        """Returns the number of first tokens that this prompt shares with any other."""
        _, before, after = self._place(tokens)
        return max(before, after)

    def _shared(self, tokens: Ids) -> NDArray[np.int64]:
        """Returns the number of first tokens that this prompt shares with each."""
        at, before, after = self._place(tokens)
        common = self._numbers[:, COMMON].copy()
        common[at : at + 1] = after
        left = np.append(common[1:at], before)[::-1]
        return np.append(np.minimum.accumulate(left)[:at][::-1], np.minimum.accumulate(common[at:]))

    def _place(self, tokens: Ids) -> tuple[int, int, int]:
        """Returns the place of such a prompt, and how many first tokens it shares with the one
        before it and with the one after it."""
        at = bisect_left(self._sorted, _sortable(tokens))
        before = common_length(self._prompts[at - 1].tokens, tokens) if at else 0
        after = common_length(self._prompts[at].tokens, tokens) if at < len(self) else 0
        return at, before, after


def _sortable(tokens: Ids) -> bytes:
    return tokens.astype(">u4").tobytes()


def _detach(entries: Iterable[Any]) -> None:
    """Detaches recurrent states from their batch: they are slices, which would keep the states of
    all rows in memory. Other caches are copied when they are extracted."""
    for leaf in leaves(entries):
        if isinstance(leaf, ArraysCache):
            leaf.cache = [None if a is None else mx.contiguous(a) for a in leaf.cache]


def _trimmed(layers: Layers, tokens: int) -> Layers:
    copies = {layer: deepcopy(entry) for layer, entry in layers.items()}
    for entry in copies.values():
        if tokens:
            entry.trim(tokens)
    return copies


def _shrink_to_use(entry: Any) -> None:
    """Frees the memory of the tokens after the entry's length."""
    for leaf in leaves([entry]):
        if isinstance(leaf, KVCache | QuantizedKVCache):
            end, arrays = leaf.offset, (leaf.keys, leaf.values)
            used = tree_map(lambda a, end=end: mx.contiguous(a[..., :end, :]), arrays)
            mx.eval(used)
            leaf.keys, leaf.values = used


@dataclass(frozen=True)
class Hold:
    """Keeps a cached prompt from being dropped: a row that waits is about to continue it."""

    prompt: CachedPrompt
    length: int
    """How many of the prompt's tokens the row continues."""
    snapshot: Snapshot


log = logging.getLogger("mlx_server.engine")

SNAPSHOT_SHARE = 4
"""The snapshots of one prompt may take one part in so many of the prompt cache."""


NO_PROMPTS = PromptIndex()


class MemoryTier:
    """The cached prompts, and those that rows hold.

    Memory is reserved for a row before it begins, and the cached prompts give way to it. A row that
    holds a prompt finds it all the same: what was dropped takes the row's own memory until the row
    begins, and of such a prompt only the part is kept that rows continue.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: the configured limit; `limit` may set a lower one."""
        self._most_bytes = self.max_bytes = most_bytes
        self._prompts: dict[CachedPrompt, None] = {}
        """The prompt to drop first comes first: the least recently used one, or an earlier turn of
        a conversation that has gone on."""
        self._by_key: dict[Key, PromptIndex] = {}
        self._uses = count()
        self._holds: dict[int, Hold | None] = {}
        """The hold of each row that waits, by its number; None if nothing of its prompt is
        known."""
        self.on_drop: Callable[[CachedPrompt], None] = lambda prompt: None
        """Called before a prompt is dropped that is not on disk and may be written there."""
        self._snapshots = Counter[Snapshot]()
        """How many prompts have each."""
        self.nbytes = 0
        """The bytes without prompts that were dropped while rows held them."""
        self._warned_too_large = False

    def fetch(self, key: Key, tokens: list[int]) -> tuple[Cache | None, int]:
        """Returns the cache of the longest known prefix of `tokens`, and the prefix's length."""
        if not (nearest := self._nearest(key, tokens)):
            return None, 0
        if nearest.prompt in self:
            self._remove(nearest.prompt)
            self._add(nearest.prompt)
        return nearest.prompt.restored(nearest.length, nearest.snapshot), nearest.length

    def hold(self, row: int, key: Key, tokens: list[int]) -> None:
        """Keeps what `fetch` would find for a row that waits, until `release`."""
        self._holds[row] = self._nearest(key, tokens)

    def release(self, row: int) -> None:
        self._holds.pop(row, None)

    def known(self, key: Key, tokens: list[int]) -> int:
        """Returns the length of the prefix that `fetch` would find."""
        nearest = self._nearest(key, tokens)
        return nearest.length if nearest else 0

    def parting(self, key: Key, tokens: list[int]) -> int:
        """Returns the length of the longest prefix of `tokens` that any prompt begins with, whether
        or not `fetch` can restore it."""
        ids = ids_of(tokens)
        held = (common for common, _ in self._held_alike(key, ids))
        longest = max(chain(held, [self._index(key).shared(ids)]))
        return longest if longest >= SHORTEST_STORED else 0

    def _nearest(self, key: Key, tokens: list[int]) -> Hold | None:
        if len(tokens) < SHORTEST_STORED:
            return None
        ids, longest, nearest = ids_of(tokens), SHORTEST_STORED - 1, None
        prompts = self._index(key).nearest(ids), *self._held_alike(key, ids)
        for common, prompt in filter(None, prompts):
            length, snapshot = prompt.reaches(common)
            if snapshot and length > longest:
                longest, nearest = length, Hold(prompt, length, snapshot)
        return nearest

    def _index(self, key: Key) -> PromptIndex:
        return self._by_key.get(key, NO_PROMPTS)

    def _held_alike(self, key: Key, ids: Ids) -> list[tuple[int, CachedPrompt]]:
        """Returns the prompts that were dropped while rows held them, each with the number of first
        tokens that they share."""
        prompts = {hold.prompt for hold in self._holds.values() if hold}
        held = [p for p in prompts if p.key == key and p not in self]
        return [(common_length(prompt.tokens, ids), prompt) for prompt in held]

    def wants(self, tokens: list[int]) -> bool:
        return self._most_bytes > 0 and len(tokens) >= SHORTEST_STORED

    def unsaved(self) -> Iterator[CachedPrompt]:
        """Returns the prompts that may be written to disk and are not, in the order in which they
        will be dropped."""
        return (prompt for prompt in self._prompts if prompt.is_unsaved)

    def __contains__(self, prompt: CachedPrompt) -> bool:
        return prompt in self._prompts

    def put_back(self, row: int, key: Key, tokens: Ids, cut: Layers, rest: Layers) -> None:
        """Keeps a prompt that was read from disk for a row; if there is no room for it, then until
        the row begins."""
        length = len(tokens)
        restored = CachedPrompt(key, tokens, cut, disk_length=length, is_saved=True)
        snapshot = restored.snapshots[length] = Snapshot(length, rest)
        if row in self._holds:  # else it has left
            self._holds[row] = Hold(restored, length, snapshot)
        self._keep(restored, rest)

    def store_snapshot(
        self, key: Key, tokens: list[int], cache: Cache, shared: int = 0, *, gives_way: bool = False
    ) -> None:
        """Keeps the state of a prompt that is still being computed, for the cached prompt that
        `store` makes of it later. cache: its entries may be changed. The others: see
        CachedPrompt."""
        prompt = CachedPrompt(key, ids_of(tokens), None, shared=shared, gives_way=gives_way)
        self._keep(prompt, split(cache)[1])

    def store(
        self,
        key: Key,
        tokens: list[int],
        cache: Cache,
        *,
        continued_from: int = 0,
        shared: int = 0,
        disk_length: int = 0,
        gives_way: bool = False,
        handed_over: bool = False,
        goes_on: bool = False,
    ) -> None:
        """continued_from, shared, disk_length, gives_way: see CachedPrompt. handed_over: the row
        has ended, so its own memory makes room for the entry. goes_on: the row continues and may
        hand its cache over later."""
        nbytes = sum(int(entry.nbytes) for entry in cache)
        if handed_over and self.nbytes + nbytes > self.max_bytes:
            for entry in cache:  # one by one: mlx-lm allocates in steps, so each is copied
                mx.eval(entry.state)
            self.max_bytes = min(self.max_bytes + nbytes, self._most_bytes)
        if nbytes > self.max_bytes:
            if not goes_on:
                self._warn_too_large(len(tokens), nbytes)
            return
        cut, rest = split(cache)
        prompt = CachedPrompt(
            key,
            ids_of(tokens),
            cut,
            continued_from=continued_from,
            shared=shared,
            disk_length=disk_length,
            gives_way=gives_way,
        )
        self._keep(prompt, rest)

    def _keep(self, prompt: CachedPrompt, rest: Layers) -> None:
        snapshot = Snapshot(len(prompt.tokens), rest)
        if (nbytes := prompt.nbytes + snapshot.nbytes) > self._room_of(prompt):
            return
        self._inherit(prompt)
        self.shrink(self.max_bytes - nbytes)  # before the entry takes memory
        entries = [*rest.values(), *(prompt.layers or {}).values()]
        _detach(entries)
        mx.async_eval([entry.state for entry in entries])
        prompt.snapshots[snapshot.length] = snapshot
        prompt.thin(min(self.max_bytes // SNAPSHOT_SHARE, self.max_bytes - prompt.nbytes))
        self._add(prompt)
        if len(self._by_key[prompt.key]) > limits.CACHED_PROMPTS:
            dropped = next(each for each in self._prompts if each.key == prompt.key)
            self._remove(dropped)
            self._leaves(dropped)
        self.shrink(self.max_bytes)

    def _add(self, prompt: CachedPrompt) -> None:
        prompt.used = next(self._uses)
        self._by_key.setdefault(prompt.key, PromptIndex()).add(prompt)
        self._prompts[prompt] = None
        new = {each for each in prompt.snapshots.values() if not self._snapshots[each]}
        self._snapshots.update(prompt.snapshots.values())
        self.nbytes += prompt.nbytes + sum(each.nbytes for each in new)
        if prompt.gives_way:
            self._drop_first(each for each in self._prompts if each.gives_way)

    def _remove(self, prompt: CachedPrompt) -> None:
        index = self._by_key[prompt.key]
        index.remove(prompt)
        if not len(index):
            del self._by_key[prompt.key]
        del self._prompts[prompt]
        self._snapshots.subtract(prompt.snapshots.values())
        gone = {each for each in prompt.snapshots.values() if not self._snapshots[each]}
        self.nbytes -= prompt.nbytes + sum(each.nbytes for each in gone)
        for each in gone:
            del self._snapshots[each]

    def _drop_first(self, prompts: Iterable[CachedPrompt]) -> None:
        self._prompts = dict.fromkeys(prompts) | self._prompts

    def _room_of(self, prompt: CachedPrompt) -> int:
        if not prompt.gives_way:
            return self.max_bytes
        giving_way = (each for each in self._prompts if each.gives_way)
        alike = sum(each.bytes_until(len(each.tokens)) for each in giving_way)
        return self.max_bytes - self.nbytes + alike

    def _inherit(self, prompt: CachedPrompt) -> None:
        """Takes the place of the prompts that the new one continues to their end. Those that it
        continues from an earlier place are the next to be dropped."""
        others = self._index(prompt.key).useful(prompt.tokens)
        superseded = {other for common, other in others if prompt.inherit(other, common)}
        prompt.gives_way = prompt.gives_way and all(each.gives_way for each in superseded)
        for row, hold in self._holds.items():
            if hold and hold.prompt in superseded:
                self._holds[row] = replace(hold, prompt=prompt)
        for other in superseded:
            self._remove(other)
        earlier = {other for common, other in others if other in self and other.goes_on(common)}
        if earlier:
            self._drop_first(each for each in self._prompts if each in earlier)

    def _warn_too_large(self, tokens: int, nbytes: int) -> None:
        if not self._warned_too_large:
            self._warned_too_large = True
            log.warning(
                "a conversation of %d tokens takes %.1f MB, and the prompt cache has room for "
                "%.1f MB: its next turn will compute the whole prompt again. `prompt_cache` "
                "and `memory_budget` in models.yaml limit the room. This is logged only once.",
                tokens,
                nbytes / 1e6,
                self.max_bytes / 1e6,
            )

    def limit(self, max_bytes: int) -> None:
        """Sets the size limit, at most the configured one, and drops entries above it."""
        self.max_bytes = min(max_bytes, self._most_bytes)
        self.shrink(self.max_bytes)

    def turn_off(self) -> None:
        """Keeps no prompts any more."""
        self._most_bytes = 0
        self.limit(0)

    def shrink(self, max_bytes: int) -> None:
        """Drops prompts until at most `max_bytes` are kept."""
        while self._prompts and self.nbytes > max_bytes:
            prompt = next(iter(self._prompts))
            self._remove(prompt)
            length = max((hold.length for hold in self._holds_of(prompt)), default=0)
            snapshots = prompt.snapshots_until(length) if length else None
            self._leaves(prompt)
            if snapshots:  # of a prompt that a row continues they stay, if they take little
                most_bytes = max_bytes // SNAPSHOT_SHARE
                snapshots.thin(most_bytes)
                if 0 < sum(each.nbytes for each in snapshots.snapshots.values()) <= most_bytes:
                    self._add(snapshots)

    def _leaves(self, prompt: CachedPrompt) -> None:
        """Calls `on_drop` for a dropped prompt, unless a row or a cached later turn continues it:
        then it is written with that one. Frees what no row continues."""
        holds = self._holds_of(prompt)
        length = max((hold.length for hold in holds), default=0)
        goes_on = prompt.goes_on(self._index(prompt.key).shared(prompt.tokens))
        is_continued = length >= prompt.disk_length or goes_on
        if prompt.is_unsaved and not is_continued:
            self.on_drop(prompt)
        if holds:
            prompt.cut_back(length, [hold.snapshot for hold in holds])

    def _holds_of(self, prompt: CachedPrompt) -> list[Hold]:
        return [hold for hold in self._holds.values() if hold and hold.prompt is prompt]

    def clear(self) -> None:
        self._prompts.clear()
        self._by_key.clear()
        self._snapshots.clear()
        self.nbytes = 0
        self._holds.clear()

    def unloaded(self, key: Key) -> None:
        """Drops the prompts of a model or an adapter that is unloaded."""
        for prompt in self.unsaved():
            if _is_within(prompt.key, key):
                self.on_drop(prompt)
        self.forget(key)

    def forget(self, key: Key) -> None:
        """Drops the prompts of this key, and of the keys that begin with its parts."""
        for prompt in [each for each in self._prompts if _is_within(each.key, key)]:
            self._remove(prompt)
        for row, hold in self._holds.items():
            if hold and _is_within(hold.prompt.key, key):
                self._holds[row] = None


def _is_within(key: Key, outer: Key) -> bool:
    return key[: len(outer)] == outer
