"""The KV caches of earlier prompts, by the key of what computed them.

A conversation takes the memory of one cache: a prompt that continues a cached one to its end takes
its place, and prompts with the same beginning share the snapshots of it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import mlx.core as mx

from mlx_server import limits
from mlx_server.engine.messages import SHORTEST_STORED
from mlx_server.prompt_files.names import Ids, common_length, may_share_more
from mlx_server.worker.prefill.cached_prompt import (
    Cache,
    CachedPrompt,
    Layers,
    Snapshot,
    beginning_of,
    detach,
    ids_of,
    split,
)
from mlx_server.worker.prefill.held_prompts import HeldPrompts, Hold

log = logging.getLogger("mlx_server.engine")

SNAPSHOT_SHARE = 4
"""The snapshots of one prompt may take one part in so many of the prompt cache."""

BETWEEN = "\0"


def cache_key(*parts: str | float | None) -> str:
    """Returns the key of what computes a prompt: a model, or a model, an adapter and its scale."""
    return BETWEEN.join(map(str, parts))


class PromptCache:
    def __init__(self, most_bytes: int) -> None:
        """most_bytes: the configured limit; `limit` may set a lower one."""
        self._most_bytes = self.max_bytes = most_bytes
        self._prompts: list[CachedPrompt] = []
        """The prompt to drop first comes first: the least recently used one, or an earlier turn of
        a conversation that has gone on."""
        self._held = HeldPrompts()
        self.on_drop: Callable[[CachedPrompt], None] = lambda prompt: None
        """Called before a prompt is dropped that is not on disk and may be written there."""
        self.nbytes = 0
        """The bytes without prompts that were dropped while rows held them."""
        self._warned_too_large = False

    def fetch(self, key: str, tokens: list[int]) -> tuple[Cache | None, int]:
        """Returns the cache of the longest known prefix of `tokens`, and the prefix's length."""
        length, snapshot, prompt = self._nearest(key, tokens)
        if prompt is None or snapshot is None:
            return None, 0
        if prompt in self:
            self._prompts.remove(prompt)
            self._prompts.append(prompt)
        return prompt.restored(length, snapshot), length

    def hold(self, row: int, key: str, tokens: list[int]) -> None:
        """Keeps what `fetch` would find for a row that waits, until `release`."""
        length, snapshot, prompt = self._nearest(key, tokens)
        self._held.begin(row, Hold(prompt, length, snapshot) if prompt and snapshot else None)

    def release(self, row: int) -> None:
        self._held.release(row)

    def known(self, key: str, tokens: list[int]) -> int:
        """Returns the length of the prefix that `fetch` would find."""
        return self._nearest(key, tokens)[0]

    def parting(self, key: str, tokens: list[int]) -> int:
        """Returns the length of the longest prefix of `tokens` that any prompt begins with, whether
        or not `fetch` can restore it."""
        ids = ids_of(tokens)
        longest = 0
        for prompt in _alike(self._known(key), ids):
            if may_share_more(prompt.tokens, ids, longest):
                longest = max(longest, common_length(prompt.tokens, ids))
        return longest if longest >= SHORTEST_STORED else 0

    def _nearest(
        self, key: str, tokens: list[int]
    ) -> tuple[int, Snapshot | None, CachedPrompt | None]:
        if len(tokens) < SHORTEST_STORED:
            return 0, None, None
        ids = ids_of(tokens)
        nearest: tuple[int, Snapshot | None, CachedPrompt | None] = 0, None, None
        # of prompts that serve equally well, the one used most recently: it replaces earlier turns
        for prompt in _alike(reversed(list(self._known(key))), ids):
            if may_share_more(prompt.tokens, ids, nearest[0]):
                length, snapshot = prompt.reaches(ids)
                nearest = max(nearest, (length, snapshot, prompt), key=lambda each: each[0])
        return nearest if nearest[0] >= SHORTEST_STORED else (0, None, None)

    def _known(self, key: str) -> Iterator[CachedPrompt]:
        """Returns the prompts of this key, including those that were dropped while rows held
        them."""
        return chain(self._with_key(key), self._held.with_key(key))

    def _with_key(self, key: str) -> Iterator[CachedPrompt]:
        return (prompt for prompt in self._prompts if prompt.key == key)

    def wants(self, tokens: list[int]) -> bool:
        return self._most_bytes > 0 and len(tokens) >= SHORTEST_STORED

    def unsaved(self) -> Iterator[CachedPrompt]:
        """Returns the prompts that may be written to disk and are not, in the order in which they
        will be dropped."""
        return (prompt for prompt in self._prompts if prompt.is_unsaved)

    def __contains__(self, prompt: CachedPrompt) -> bool:
        return any(prompt is kept for kept in self._prompts)

    def put_back(self, row: int, key: str, tokens: Ids, cut: Layers, rest: Layers) -> None:
        """Keeps a prompt that was read from disk for a row; if there is no room for it, then until
        the row begins."""
        length = len(tokens)
        restored = CachedPrompt(key, tokens, cut, disk_length=length, is_saved=True)
        snapshot = restored.snapshots[length] = Snapshot(length, rest)
        self._held.replace(row, Hold(restored, length, snapshot))
        self._keep(restored, rest)

    def store_snapshot(self, key: str, tokens: list[int], cache: Cache, shared: int = 0) -> None:
        """Keeps the state of a prompt that is still being computed, for the cached prompt that
        `store` makes of it later. cache: its entries may be changed. shared: see CachedPrompt."""
        _, layers = split(cache)
        self._keep(CachedPrompt(key, ids_of(tokens), None, shared=shared), layers)

    def store(
        self,
        key: str,
        tokens: list[int],
        cache: Cache,
        *,
        continued_from: int = 0,
        shared: int = 0,
        disk_length: int = 0,
        handed_over: bool = False,
        goes_on: bool = False,
    ) -> None:
        """continued_from, shared, disk_length: see CachedPrompt. handed_over: the row has ended, so
        its own memory makes room for the entry. goes_on: the row continues and may hand its cache
        over later."""
        nbytes = sum(int(entry.nbytes) for entry in cache)
        if handed_over and self.nbytes + nbytes > self.max_bytes:
            _take_over(cache)
            self.max_bytes = min(self.max_bytes + nbytes, self._most_bytes)
        if nbytes > self.max_bytes:
            if not goes_on:
                self._warn_too_large(len(tokens), nbytes)
            return
        cut, layers = split(cache)
        prompt = CachedPrompt(
            key,
            ids_of(tokens),
            cut,
            continued_from=continued_from,
            shared=shared,
            disk_length=disk_length,
        )
        self._keep(prompt, layers)

    def _keep(self, prompt: CachedPrompt, layers: Layers) -> None:
        snapshot = Snapshot(len(prompt.tokens), layers)
        if (nbytes := prompt.nbytes + snapshot.nbytes) > self.max_bytes:
            return
        self._inherit(prompt)
        self.shrink(self.max_bytes - nbytes)  # before the entry takes memory
        kept = [*layers.values(), *(prompt.layers or {}).values()]
        for entry in kept:
            detach(entry)
        mx.async_eval([entry.state for entry in kept])
        prompt.snapshots[snapshot.length] = snapshot
        prompt.thin(min(self.max_bytes // SNAPSHOT_SHARE, self.max_bytes - prompt.nbytes))
        self._prompts.append(prompt)
        of_key = list(self._with_key(prompt.key))
        for dropped in of_key[: -limits.CACHED_PROMPTS]:
            self._prompts.remove(dropped)
            self._leaves(dropped)
            self._held.dropped(dropped)
        self._count()
        self.shrink(self.max_bytes)

    def _inherit(self, prompt: CachedPrompt) -> None:
        """Takes the place of the prompts that the new one continues to their end. Those that it
        continues from an earlier place are the next to be dropped."""
        others = list(_alike(self._with_key(prompt.key), prompt.tokens))
        superfluous = {other for other in others if prompt.inherit(other)}
        for other in superfluous:
            self._held.superseded(other, prompt)
        earlier = [o for o in others if o not in superfluous and prompt.continues(o)]
        moved = superfluous.union(earlier)
        rest = [p for p in self._prompts if p not in moved]
        self._prompts = [*earlier, *rest]
        self._count()

    def _count(self) -> None:
        snapshots = {s for prompt in self._prompts for s in prompt.snapshots.values()}
        self.nbytes = sum(p.nbytes for p in self._prompts) + sum(s.nbytes for s in snapshots)

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
            self._drop(self._prompts.pop(0), max_bytes // SNAPSHOT_SHARE)
            self._count()

    def _drop(self, prompt: CachedPrompt, most_bytes: int) -> None:
        """most_bytes: what the snapshots of a prompt that a row continues may go on to take."""
        self._leaves(prompt)
        if length := self._held.length(prompt):
            snapshots = prompt.snapshots_until(length)
            self._held.dropped(prompt)
            snapshots.thin(most_bytes)
            if 0 < sum(each.nbytes for each in snapshots.snapshots.values()) <= most_bytes:
                self._prompts.append(snapshots)

    def _leaves(self, prompt: CachedPrompt) -> None:
        """Calls `on_drop` for a dropped prompt, unless a row or a cached later turn continues it:
        then it is written with that one."""
        others = _alike(self._with_key(prompt.key), prompt.tokens)
        is_held = self._held.length(prompt) >= prompt.disk_length
        if prompt.is_unsaved and not is_held and not any(o.continues(prompt) for o in others):
            self.on_drop(prompt)

    def clear(self) -> None:
        self._prompts = []
        self._held.clear()
        self._count()

    def unloaded(self, key: str) -> None:
        """Drops the prompts of a model or an adapter that is unloaded."""
        for prompt in self.unsaved():
            if _is_within(prompt.key, key):
                self.on_drop(prompt)
        self.forget(key)

    def forget(self, key: str) -> None:
        """Drops this key and the keys that begin with its parts, such as a model's adapters."""
        within = key + BETWEEN
        self._prompts = [p for p in self._prompts if not _is_within(p.key, key)]
        self._held.forget(key, within)
        self._count()


def _is_within(key: str, outer: str) -> bool:
    """Whether a key is the outer one, or begins with its parts."""
    return key == outer or key.startswith(outer + BETWEEN)


def _alike(prompts: Iterable[CachedPrompt], ids: Ids) -> Iterator[CachedPrompt]:
    """Yields the prompts that begin like this one, so that there is something to share."""
    beginning = beginning_of(ids)
    return (prompt for prompt in prompts if prompt.beginning == beginning)


def _take_over(cache: Cache) -> None:
    """Evaluates the cache layer by layer, so that at most one layer is in memory twice: mlx-lm
    allocates a row's cache in steps, and the used part has to be copied."""
    for entry in cache:
        mx.eval(entry.state)
