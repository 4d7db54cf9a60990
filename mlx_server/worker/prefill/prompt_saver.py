"""Writes cached prompts to disk, a piece at a time.

The thread that owns MLX copies some arrays to contiguous ones and does not wait for them. When they
are computed, another thread writes their memory to a file.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_server import limits
from mlx_server.prompt_files.contents import DamagedFile, RawTensor, encoded
from mlx_server.prompt_files.folder import PromptFolder
from mlx_server.prompt_files.names import Ids, PromptFile, block_file, links_of, state_file
from mlx_server.worker.prefill.cache_layout import (
    NAMES,
    Arrays,
    CacheLayout,
    check_numbers,
    named_arrays,
    numbers_of,
    rest_sizes,
    shapes_fit,
)
from mlx_server.worker.prefill.cached_prompt import CachedPrompt, Layers, superfluous
from mlx_server.worker.prefill.disk_models import DiskModel, DiskModels
from mlx_server.worker.prefill.leaving_prompts import LeavingPrompts
from mlx_server.worker.prefill.prompt_cache import SNAPSHOT_SHARE, PromptCache

log = logging.getLogger("mlx_server.engine")

PIECE_BYTES = 32 << 20
"""The bytes that are copied at a time."""

LEAVING_SHARE = 64
"""Prompts that left the prompt cache keep at most MLX's memory limit divided by this, since the
limit is full without them."""

PAUSE_SECONDS = 60.0
"""The time in which nothing is written after the disk has refused a file."""


@dataclass(frozen=True)
class Write:
    """A job of the thread that writes."""

    model: str
    future: Future[None]
    nbytes: int


class PromptSaver:
    def __init__(
        self,
        folder: PromptFolder,
        models: DiskModels,
        cache: PromptCache,
        wake: Callable[[], None],
    ) -> None:
        """wake: called in another thread when a file has been written."""
        self._folder, self._models, self._cache, self._wake = folder, models, cache, wake
        self._thread = ThreadPoolExecutor(1, "prompt-writer")
        self._writes: deque[Write] = deque()
        self._leaving = LeavingPrompts(folder.block)
        self._prompt: CachedPrompt | None = None
        self._work: Iterator[None] = iter(())
        self._lock = threading.Lock()
        self._written_bytes = 0
        self._misfits: set[str] = set()
        """The models with caches of an unexpected shape."""
        self._paused_until = 0.0
        self._is_refused = False
        """Whether the last file could not be written, which has been logged."""

    @property
    def written_bytes(self) -> int:
        """The bytes written since this was last read."""
        with self._lock:
            count, self._written_bytes = self._written_bytes, 0
            return count

    @property
    def is_full(self) -> bool:
        """Whether the bytes that wait for the disk have reached their limit."""
        while self._writes and self._writes[0].future.done():
            self._writes.popleft()
        return self._copied_bytes >= limits.PROMPT_WRITE_BYTES

    @property
    def _copied_bytes(self) -> int:
        return sum(write.nbytes for write in self._writes if not write.future.done())

    def keep(self, prompt: CachedPrompt) -> None:
        """Keeps a prompt that leaves the prompt cache until it is written, as far as there is room
        among what waits for the disk."""
        model = self._models.of(prompt.key)
        if model and time.monotonic() >= self._paused_until:
            waiting = self._copied_bytes + self._leaving.nbytes
            most = min(limits.PROMPT_WRITE_BYTES, mx.get_memory_limit() // LEAVING_SHARE)
            self._leaving.add(model, prompt, most - waiting)

    def next(self, key: str | None = None, since: float = float("inf")) -> CachedPrompt | None:
        """Returns the prompt that is written now or next. key: the model to which it has to belong;
        None: any. since: the time before which it was last used, unless it leaves the prompt
        cache."""
        if self._prompt and self._is_there(self._prompt):
            return self._prompt
        self._prompt, self._work = None, iter(())
        if leaving := self._leaving.first(key):
            return leaving
        for prompt in self._cache.unsaved():
            model = self._models.of(prompt.key)
            if model is None:
                prompt.is_saved = True
            elif prompt.since <= since and key in (None, model.id):
                return prompt
        return None

    def _is_there(self, prompt: CachedPrompt) -> bool:
        return prompt in self._cache or self._leaving.model_of(prompt) is not None

    def save_piece(self, prompt: CachedPrompt) -> None:
        """Copies a piece of the prompt that `next` returned, or submits one for writing."""
        if prompt is not self._prompt:
            model = self._leaving.model_of(prompt) or self._models.of(prompt.key)
            assert model is not None
            self._prompt, self._work = prompt, self._saving(model, prompt)
        try:
            next(self._work)
        except StopIteration:
            self._end(prompt)

    def give_up(self) -> None:
        """Drops the prompt that is being written."""
        if self._prompt:
            self._end(self._prompt)

    def clear(self) -> None:
        """Drops the prompts that left the prompt cache: the failed GPU may have lost their
        values."""
        self._leaving.clear()

    def _end(self, prompt: CachedPrompt) -> None:
        prompt.is_saved = True
        self._leaving.remove(prompt)
        self._prompt, self._work = None, iter(())

    def flush(self, deadline: float, key: str | None = None) -> None:
        """Writes what is not written, and waits for the files until `deadline`, a time of
        `time.monotonic`: later lookups find only finished files. key: a model whose prompts and
        files alone are meant."""
        while time.monotonic() < deadline and (prompt := self.next(key)):
            if self.is_full:
                wait([self._writes[0].future], deadline - time.monotonic())
            else:
                self.save_piece(prompt)
        self._join(deadline, key)

    def _join(self, deadline: float, key: str | None) -> None:
        of_key = [write.future for write in self._writes if key in (None, write.model)]
        wait(of_key, max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        self._thread.shutdown(wait=True)

    def remove(self, model: DiskModel, key: str) -> None:
        """Removes a key's files after the writes so far, also while the disk takes no others."""
        group = model.group(key)
        self._leaving.remove_key(model, key)
        self._submit(model, lambda: self._folder.remove_if(lambda file: file.group == group), 0)

    def _submit(self, model: DiskModel, work: Callable[[], None], nbytes: int) -> None:
        future = self._thread.submit(work)
        self._writes.append(Write(model.id, future, nbytes))
        future.add_done_callback(lambda done: self._wake())

    def _guarded(self, work: Callable[[], None]) -> None:
        if time.monotonic() < self._paused_until:
            return
        try:
            work()
            self._is_refused = False
        except OSError as error:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            if not self._is_refused:
                log.warning(
                    "prompt caches can't be written to disk: %s. They are kept in memory only, and "
                    "the disk is tried again now and then.",
                    error.strerror or error,
                )
            self._is_refused = True
        except Exception:
            log.exception("a prompt could not be written to disk")

    def _saving(self, model: DiskModel, prompt: CachedPrompt) -> Iterator[None]:
        ids, group = prompt.tokens[: prompt.disk_length], model.group(prompt.key)
        links = links_of(ids, self._folder.block)
        assert prompt.layers is not None
        files = []
        if model.layout.cut:
            for at in range(len(links) - 1):
                files.append(file := block_file(group, links, at, self._folder.block))
                begin = at * self._folder.block
                yield from self._save(model, prompt, file, begin, {})
        kept, dropped = self._states(model, prompt, ids, links)
        for length in kept:
            file = state_file(group, links, ids, length, self._folder.block)
            files.append(file)
            begin = length - length % self._folder.block
            rest = prompt.snapshots[length].layers if model.layout.has_states else {}
            yield from self._save(model, prompt, file, begin, rest)
        tidy = partial(self._tidy, files, dropped, group, ids, links)
        self._submit(model, partial(self._guarded, tidy), 0)

    def _states(
        self, model: DiskModel, prompt: CachedPrompt, ids: Ids, links: Sequence[str]
    ) -> tuple[list[int], list[PromptFile]]:
        """Returns the lengths at which states are kept, and the other prompts' files that these
        make superfluous."""
        known = {f.length: f for f in self._folder.states_of(model.group(prompt.key), ids, links)}
        if not model.layout.has_states:  # all but the last tokens are in blocks
            ends = [len(ids)] if len(ids) % self._folder.block else []
            return ends, [file for length, file in known.items() if length not in ends]
        taken = {n: each.nbytes for n, each in prompt.snapshots.items() if n <= len(ids)}
        sizes = taken | {n: self._folder.size_of(file) for n, file in known.items()}
        expected = prompt.shared, prompt.continued_from
        unwanted = superfluous(sizes, self._folder.most_bytes // SNAPSHOT_SHARE, expected)
        kept = [length for length in sorted(taken) if length not in unwanted]
        return kept, [file for length, file in known.items() if length in unwanted]

    def _tidy(
        self,
        used: Sequence[PromptFile],
        dropped: Sequence[PromptFile],
        group: str,
        ids: Ids,
        links: Sequence[str],
    ) -> None:
        for file in dropped:
            self._folder.remove(file)
        self._folder.touch(used)
        self._folder.note(group, ids, links)

    def _save(
        self, model: DiskModel, prompt: CachedPrompt, file: PromptFile, begin: int, rest: Layers
    ) -> Iterator[None]:
        if file in self._folder:
            return
        cut = named_arrays(prompt.layers or {})
        arrays = {name: array[:, :, begin : file.length] for name, array in cut.items()}
        arrays |= (own := named_arrays(rest))
        numbers = {str(layer): numbers_of(entry) for layer, entry in rest.items()}
        about = {"model": model.id, "rest": numbers}
        if not _can_be_restored(model.layout, cut, own, numbers, file):
            self._log_misfit(model.id)
            return
        raw: dict[str, mx.array] = {}
        size = 0
        for name, array in arrays.items():
            raw[name] = mx.contiguous(array).reshape(-1).view(mx.uint8)
            mx.async_eval(raw[name])
            size += array.nbytes
            if size >= PIECE_BYTES:
                size = 0
                yield
        yield
        tensors = {name: _raw_tensor(array, raw[name]) for name, array in arrays.items()}
        ids = prompt.tokens[begin : file.length].copy()
        pieces = encoded(file, ids, about, tensors)
        nbytes = sum(piece.nbytes for piece in pieces)
        write = partial(self._guarded, partial(self._write_file, file, pieces, ids))
        self._submit(model, write, nbytes)

    def _log_misfit(self, model: str) -> None:
        if model not in self._misfits:
            self._misfits.add(model)
            log.warning(
                "a prompt cache of %s has an unexpected shape, so it is not written to disk. This "
                "is logged only once.",
                model,
            )

    def _write_file(self, file: PromptFile, pieces: Sequence[memoryview], ids: Ids) -> None:
        """ids: the tokens that only this file stands for."""
        nbytes = self._folder.write(file, pieces)
        if file.tail:
            self._folder.learn_tail(file, ids)
        with self._lock:
            self._written_bytes += nbytes


def _raw_tensor(array: mx.array, raw: mx.array) -> RawTensor:
    data = memoryview(raw) if raw.size else memoryview(b"")  # type: ignore[arg-type]
    return RawTensor(NAMES[array.dtype], array.shape, data)


def _can_be_restored(
    layout: CacheLayout, cut: Arrays, rest: Arrays, numbers: Mapping[str, Any], file: PromptFile
) -> bool:
    """Whether the arrays are what the reader of the file will expect."""
    found = {n: (NAMES.get(a.dtype, ""), a.shape) for n, a in (cut | rest).items()}
    if not shapes_fit(layout.cut if not rest else {**layout.cut, **layout.rest}, found):
        return False
    shapes = {name: array.shape for name, array in rest.items()}
    try:
        for layer, own in numbers.items():
            sizes = rest_sizes(int(layer), shapes)
            check_numbers(layout.fresh[int(layer)], sizes, own, file.length)
    except DamagedFile:  # a window that is not in one of the known forms
        return False
    return True
