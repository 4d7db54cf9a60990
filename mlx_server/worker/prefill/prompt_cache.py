"""The KV caches of earlier prompts: one LRUPromptCache of mlx-lm for each model and adapter.

There is one for each because LRUPromptCache can't drop all entries of a key, which unloading a
model requires. The caches that it returns are copies that share arrays until one side writes.
"""

import logging
from typing import Any

import mlx.core as mx

from mlx_server import limits
from mlx_server.worker.mlx_lm_internals import (
    ArraysCache,
    CacheList,
    LRUPromptCache,
    PromptTrie,
    PromptTrieResult,
)

log = logging.getLogger("mlx_server.engine")

SHORTEST = 16
"""The fewest tokens of a prefix: a shorter one costs more to keep than to compute."""

VALUE = "__value__"
"""mlx-lm's key for a value in a node of its trie, next to the tokens that lead to other nodes."""

BETWEEN = "\0"

Cache = list[Any]
Path = tuple["Path", int] | None


def cache_key(*parts: str | float | None) -> str:
    """Returns the key of what computes a prompt: a model, or a model, an adapter and its scale."""
    return BETWEEN.join(map(str, parts))


class PromptCache:
    def __init__(self, most_bytes: int) -> None:
        """most_bytes: the configured limit; `limit` may set a lower one."""
        self._most_bytes = self.max_bytes = most_bytes
        self._by_key: dict[str, _Sequences] = {}
        """The sequences by key, least recently used key first."""
        self._warned_too_large = False

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self._by_key.values())

    def fetch(self, key: str, tokens: list[int]) -> tuple[Cache | None, int]:
        """Returns the cache of the longest known prefix of `tokens`, and the prefix's length."""
        found = self._by_key.get(key)
        if found is None or len(tokens) < SHORTEST:
            return None, 0
        self._by_key[key] = self._by_key.pop(key)  # the most recently used key comes last
        cache, rest = found.fetch_nearest_cache(key, tokens)
        cached = len(tokens) - len(rest)
        return (cache, cached) if cache and cached >= SHORTEST else (None, 0)

    def known(self, key: str, tokens: list[int]) -> int:
        """Returns an upper bound on the length of the prefix that `fetch` would find."""
        found = self._by_key.get(key)
        return found.known(key, tokens) if found and len(tokens) >= SHORTEST else 0

    def wants(self, tokens: list[int]) -> bool:
        return self._most_bytes > 0 and len(tokens) >= SHORTEST

    def store(
        self,
        key: str,
        tokens: list[int],
        cache: Cache,
        *,
        handed_over: bool = False,
        goes_on: bool = False,
    ) -> None:
        """handed_over: the row has ended, so its own memory makes room for the entry.
        goes_on: the row continues and may hand its cache over later."""
        nbytes = sum(int(c.nbytes) for c in cache)
        if handed_over and self.nbytes + nbytes > self.max_bytes:
            _take_over(cache)
            self.max_bytes = min(self.max_bytes + nbytes, self._most_bytes)
        if nbytes > self.max_bytes:
            if not goes_on:
                self._warn_too_large(len(tokens), nbytes)
            return
        self.shrink(self.max_bytes - nbytes)  # before the entry takes memory
        for entry in cache:
            _detach(entry)
        mx.async_eval([c.state for c in cache])
        kept = self._by_key.pop(key, None) or _Sequences(max_size=limits.CACHED_PROMPTS.value)
        self._by_key[key] = kept
        kept.insert_cache(key, tokens, cache)
        self.shrink(self.max_bytes)

    def _warn_too_large(self, tokens: int, nbytes: int) -> None:
        if not self._warned_too_large:
            self._warned_too_large = True
            log.warning(
                "a conversation of %d tokens takes %.1f MB, and the prompt cache has room for "
                "%.1f MB: its next turn will compute the whole prompt again. `prompt_cache_bytes` "
                "and `memory_budget` in models.yaml limit the room. This is logged only once.",
                tokens,
                nbytes / 1e6,
                self.max_bytes / 1e6,
            )

    def limit(self, max_bytes: int) -> None:
        """Sets the size limit, at most the configured one, and drops entries above it."""
        self.max_bytes = min(max_bytes, self._most_bytes)
        self.shrink(self.max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Drops entries until at most `max_bytes` are kept, least recently used keys first."""
        for key in list(self._by_key):
            excess = self.nbytes - max_bytes
            if excess <= 0:
                return
            self._by_key[key].trim_to(n_bytes=int(self._by_key[key].nbytes) - excess)
            if not len(self._by_key[key]):
                del self._by_key[key]

    def clear(self) -> None:
        self._by_key.clear()

    def forget(self, key: str) -> None:
        """Drops this key and the keys that begin with its parts, such as a model's adapters."""
        for known in list(self._by_key):
            if known == key or known.startswith(key + BETWEEN):
                del self._by_key[known]


class _Sequences(LRUPromptCache):
    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self._trie = _Trie()

    def known(self, key: str, tokens: list[int]) -> int:
        found = self._trie.search(key, tokens)
        if found.exact is not None:
            return len(tokens)
        return max(len(found.shorter or ()), found.common_prefix if found.longer else 0)


class _Trie(PromptTrie):
    def search(self, model: Any, tokens: list[int]) -> PromptTrieResult:
        """Finds the same result as mlx-lm in linear time: mlx-lm copies the path to a longer
        sequence at each step, which takes over a second for a long conversation."""
        node, index, last = self._trie.get(model, {}), 0, 0
        while index < len(tokens) and tokens[index] in node:
            node = node[tokens[index]]
            index += 1
            last = index if VALUE in node else last
        if last and last == len(tokens):
            return PromptTrieResult(model, tokens, None, None, 0)
        shorter = tokens[:last] or None
        longer = tokens[:index] + _nearest(node) if index else None
        return PromptTrieResult(model, None, shorter, longer, index)


def _nearest(node: dict[Any, Any]) -> list[int]:
    """Returns the tokens to the nearest value below the node; every branch of a trie has one."""
    level: list[tuple[dict[Any, Any], Path]] = [(node, None)]
    while True:
        for below, path in level:
            if VALUE in below:
                return _unrolled(path)
        level = [(child, (path, token)) for below, path in level for token, child in below.items()]


def _unrolled(path: Path) -> list[int]:
    tokens = []
    while path is not None:
        path, token = path
        tokens.append(token)
    return tokens[::-1]


def _take_over(cache: Cache) -> None:
    """Evaluates the cache layer by layer, so that at most one layer is in memory twice: mlx-lm
    allocates a row's cache in steps, and the used part has to be copied."""
    for entry in cache:
        mx.eval(entry.state)


def _detach(entry: Any) -> None:
    """Detaches a recurrent state from its batch: it is a slice, which would keep the states of all
    rows in memory. Other caches are copied when they are extracted."""
    match entry:
        case ArraysCache():
            entry.cache = [None if a is None else mx.contiguous(a) for a in entry.cache]
        case CacheList():
            for inner in entry.caches:
                _detach(inner)
