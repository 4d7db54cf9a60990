"""Prompts computed before: mlx-lm's LRUPromptCache, one for each model and adapter.

One for each, because it can't forget all of one key, and a model that is unloaded must leave
nothing behind. What it returns is a copy that shares its arrays until one side writes.
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
"""Tokens; a shorter prefix costs more to keep than to compute."""

VALUE = "__value__"
"""mlx-lm's own key in its trie, among the tokens that lead on."""

BETWEEN = "\0"

Cache = list[Any]
Path = tuple["Path", int] | None


def cache_key(*parts: str | float | None) -> str:
    """Of what computes a prompt: a model, or a model, an adapter and how much of it."""
    return BETWEEN.join(map(str, parts))


class PromptCache:
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self.max_bytes = most_bytes
        self._by_key: dict[str, _Sequences] = {}
        self._said_too_large = False

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self._by_key.values())

    def fetch(self, key: str, tokens: list[int]) -> tuple[Cache | None, int]:
        """The cache of the longest known prefix of `tokens`, and its length."""
        found = self._by_key.get(key)
        if found is None or len(tokens) < SHORTEST:
            return None, 0
        self._by_key[key] = self._by_key.pop(key)  # the last used key is dropped last
        cache, rest = found.fetch_nearest_cache(key, tokens)
        cached = len(tokens) - len(rest)
        return (cache, cached) if cache and cached >= SHORTEST else (None, 0)

    def known(self, key: str, tokens: list[int]) -> int:
        """How long a prefix `fetch` would find, at most."""
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
        """handed_over: by a row that has ended, whose own memory makes room for the entry.
        goes_on: the row may still hand its cache over."""
        nbytes = sum(int(c.nbytes) for c in cache)
        if handed_over and self.nbytes + nbytes > self.max_bytes:
            _take_over(cache)
            self.max_bytes = min(self.max_bytes + nbytes, self._most_bytes)
        if nbytes > self.max_bytes:
            if not goes_on:
                self._say_too_large(len(tokens), nbytes)
            return
        self.shrink(self.max_bytes - nbytes)  # before it takes any
        for entry in cache:
            _part(entry)
        mx.async_eval([c.state for c in cache])
        kept = self._by_key.pop(key, None) or _Sequences(max_size=limits.CACHED_PROMPTS.value)
        self._by_key[key] = kept  # the last used key is dropped last
        kept.insert_cache(key, tokens, cache)
        self.shrink(self.max_bytes)

    def _say_too_large(self, tokens: int, nbytes: int) -> None:
        if not self._said_too_large:
            self._said_too_large = True
            log.warning(
                "a conversation of %d tokens takes %.1f MB, and the prompt cache has room for "
                "%.1f MB: its next turn will compute the whole prompt again. `prompt_cache_bytes` "
                "and `memory_budget` in models.yaml bound the room. This is said once.",
                tokens,
                nbytes / 1e6,
                self.max_bytes / 1e6,
            )

    def limit(self, max_bytes: int) -> None:
        """What it may hold from now on, up to what it may hold at all."""
        self.max_bytes = min(max_bytes, self._most_bytes)
        self.shrink(self.max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Keep at most so much, dropping the keys first that were used the longest ago."""
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
        """This key and those that begin with its parts: a model's adapters go with it."""
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
        """As in mlx-lm, in linear time: there, the path to what continues the tokens is copied at
        each of its steps, which takes over a second for a long conversation."""
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
    """The tokens to the nearest value below; in a trie, every branch ends in one."""
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
    """Layer by layer, so that no more than one exists twice. mlx-lm allocates a row's cache in
    steps, and what is cut from that has to be copied."""
    for entry in cache:
        mx.eval(entry.state)


def _part(entry: Any) -> None:
    """Part it from its batch. Others are copied when extracted, but a recurrent state is a slice,
    which would keep the states of all rows."""
    match entry:
        case ArraysCache():
            entry.cache = [None if a is None else mx.contiguous(a) for a in entry.cache]
        case CacheList():
            for inner in entry.caches:
                _part(inner)
