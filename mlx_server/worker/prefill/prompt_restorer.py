"""Brings prompts back from disk: a thread reads them while rows of other prompts go on, and MLX's
thread takes over the arrays a piece at a time."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlx_server.prompt_files.folder import PromptFolder
from mlx_server.prompt_files.names import Ids
from mlx_server.worker.prefill.cache_layout import TYPES, Arrays, cut_layers_of, layers_of
from mlx_server.worker.prefill.cached_prompt import ids_of
from mlx_server.worker.prefill.disk_models import DiskModels
from mlx_server.worker.prefill.prompt_cache import PromptCache
from mlx_server.worker.prefill.stored_prompt import StoredPrompt, found_files, load

LEAST_GAIN = 32
"""Tokens that the disk must have beyond the memory: fewer cost less to compute again."""

PIECE_BYTES = 64 << 20
"""The bytes that are taken over at a time, if no single array is larger."""


@dataclass(eq=False)
class PromptRead:
    """A row's request for what the disk has of its prompt."""

    row: int
    key: str
    ids: Ids
    tokens: list[int]


@dataclass
class DiskReads:
    """Counts of the lookups on disk."""

    hits: int = 0
    misses: int = 0
    tokens: int = 0
    """Tokens that were not in memory and came from disk."""
    nbytes: int = 0
    """Bytes read."""


class PromptRestorer:
    def __init__(
        self,
        folder: PromptFolder,
        models: DiskModels,
        cache: PromptCache,
        wake: Callable[[], None],
    ) -> None:
        self._folder, self._models, self._cache, self._wake = folder, models, cache, wake
        self._thread = ThreadPoolExecutor(1, "prompt-reader")
        self._waiting: deque[PromptRead] = deque()
        self._read: PromptRead | None = None
        self._loading: Future[StoredPrompt | None] | None = None
        self._work: Iterator[None] | None = None
        self.reads = DiskReads()

    def stop(self) -> None:
        self._thread.shutdown(wait=True)

    def begin(self, row: int, key: str, tokens: list[int]) -> bool:
        """Whether the disk has more of this prompt than the memory; the row then waits for it."""
        read = PromptRead(row, key, ids_of(tokens), tokens)
        if self._models.of(key) is None or len(tokens) < LEAST_GAIN:
            return False
        if self._gain(read) < LEAST_GAIN:
            self.reads.misses += len(tokens) - self._cache.known(key, tokens) >= LEAST_GAIN
            return False
        self._waiting.append(read)
        return True

    def is_reading(self, row: int) -> bool:
        return any(read.row == row for read in (self._read, *self._waiting) if read)

    @property
    def is_due(self) -> bool:
        """Whether `step` has something to do now."""
        if self._read is None:
            return bool(self._waiting)
        return self._work is not None or (self._loading is not None and self._loading.done())

    def give_up(self) -> None:
        """Drops the prompt that is being taken over."""
        if self._work is not None:
            self._read = self._work = None

    def step(self) -> None:
        """Takes over what was read, up to a large piece, and begins to read the next prompt."""
        if self._loading and self._loading.done():
            self._take(self._loading)
        if self._work is not None and next(self._work, "end") == "end":
            self._read = self._work = None
        while self._read is None and self._waiting:
            self._load(self._waiting.popleft())

    def _gain(self, read: PromptRead) -> int:
        """Returns the number of tokens that the disk has beyond the memory."""
        model = self._models.of(read.key)
        if model is None:
            return 0
        found = found_files(self._folder, model.layout, model.group(read.key), read.ids)
        if found is None:
            return 0
        return found.most - self._cache.known(read.key, read.tokens)

    def _load(self, read: PromptRead) -> None:
        model = self._models.of(read.key)
        if model is None or self._gain(read) < LEAST_GAIN:
            return
        least = self._cache.known(read.key, read.tokens) + LEAST_GAIN
        group = model.group(read.key)
        work = partial(load, self._folder, model.layout, group, read.ids, least)
        self._read = read
        self._loading = self._thread.submit(work)
        self._loading.add_done_callback(lambda done: self._wake())

    def _take(self, loading: Future[StoredPrompt | None]) -> None:
        self._loading = None
        stored = loading.result() if loading.exception() is None else None
        if stored is None:
            self.reads.misses += 1
            self._read = None
            return
        if stored.nbytes <= self._cache.max_bytes:
            self._cache.shrink(self._cache.max_bytes - stored.nbytes)
        self._work = self._taking(stored)

    def _taking(self, stored: StoredPrompt) -> Iterator[None]:
        """Yields after each large piece."""
        read = self._read
        assert read is not None
        cut, rest = Arrays(), Arrays()
        taken = 0
        for arrays, tensors in ((cut, stored.cut), (rest, stored.rest)):
            for name in list(tensors):
                dtype, items = tensors.pop(name)  # NumPy's memory is freed
                if taken + items.nbytes > PIECE_BYTES and taken:
                    taken = 0
                    yield
                arrays[name] = mx.array(items).view(TYPES[dtype])
                mx.async_eval(arrays[name])
                taken += items.nbytes
        if model := self._models.of(read.key):
            known = self._cache.known(read.key, read.tokens)
            ids = read.ids[: stored.length].copy()
            numbers = {int(layer): own for layer, own in stored.numbers.items()}
            self._cache.put_back(
                read.row,
                read.key,
                ids,
                cut_layers_of(model.layout.cut_layers, cut, stored.length),
                layers_of(model.layout.rest_layers, rest, numbers),
            )
            self.reads.hits += 1
            self.reads.tokens += stored.length - known
            self.reads.nbytes += stored.nbytes
