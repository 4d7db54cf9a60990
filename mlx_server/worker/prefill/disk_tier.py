"""The prompt cache's tier on disk, which survives the eviction of a model and the engine's end.

Prompts are written while no row runs, and in single pieces between the steps of rows; first of all
those that had to leave the memory. What is on disk comes back to the prompt cache in memory before
its row is computed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server import limits
from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import FLUSH_SECONDS, DiskCacheUse
from mlx_server.errors import public_message
from mlx_server.models.files import identity_of_model
from mlx_server.prompt_files.contents import DamagedFile, RawTensor, encoded
from mlx_server.prompt_files.folder import FolderInUse, PromptFolder
from mlx_server.prompt_files.names import (
    Ids,
    PromptFile,
    block_file,
    group_of,
    links_of,
    state_file,
)
from mlx_server.worker.prefill.prompt_cache import (
    BETWEEN,
    SNAPSHOT_SHARE,
    CachedPrompt,
    Layers,
    PromptCache,
    ids_of,
    superfluous,
)
from mlx_server.worker.prefill.stored_prompt import (
    NAMES,
    TYPES,
    Arrays,
    CacheLayout,
    StoredPrompt,
    check_numbers,
    cut_layers_of,
    found_files,
    layers_of,
    layout_of,
    load,
    named_arrays,
    numbers_of,
    rest_sizes,
    shapes_fit,
)

log = logging.getLogger("mlx_server.engine")

FORMAT = "1"
"""The version of the files' format. Files of another version are not used."""


@dataclass(frozen=True)
class DiskModel:
    id: str
    identity: str
    """A digest of the model's files, the versions of MLX and the layout of the caches."""
    layout: CacheLayout

    def group(self, key: str) -> str:
        """Returns the group of files for this key of the prompt cache. The key's other parts are
        the adapter's digest, its scale and the cache scope."""
        _, *others = key.split(BETWEEN)
        return group_of(FORMAT, self.identity, *others)


class DiskModels:
    """The loaded models whose prompt caches can be kept on disk."""

    def __init__(self) -> None:
        self._models: dict[str, DiskModel] = {}

    def add(self, id: str, path: Path, network: nn.Module) -> None:
        try:
            if layout := layout_of(network):
                device = "metal" if mx.metal.is_available() else "cpu"
                versions = (version("mlx"), version("mlx-lm"), device)
                files = identity_of_model(path)
                self._models[id] = DiskModel(
                    id, group_of(files, *versions, layout.describe()), layout
                )
        except Exception as error:  # the model works without files
            log.warning(
                "the prompt caches of %s are not kept on disk: %s", id, public_message(error)
            )

    def forget(self, id: str) -> None:
        self._models.pop(id, None)

    def of(self, key: str) -> DiskModel | None:
        """Returns the model that computes the prompts with this key; None if it has no files."""
        return self._models.get(key.partition(BETWEEN)[0])


@dataclass(frozen=True)
class LeavingPrompt:
    model: DiskModel
    """The model that computed it, which may be unloaded by now."""
    prompt: CachedPrompt
    nbytes: int


class LeavingPrompts:
    """The prompts that left the prompt cache before they were written, for example because a row
    needed their memory.

    They keep their memory until they are written, within a limit. Of a larger prompt only the
    beginning is kept, which other prompts may have too.
    """

    def __init__(self, block: int) -> None:
        """block: the number of tokens whose layers are in one file."""
        self._block = block
        self._leaving: list[LeavingPrompt] = []

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._leaving)

    def add(self, model: DiskModel, prompt: CachedPrompt, most_bytes: int) -> None:
        """Keeps as much of the prompt as has at most so many bytes. The prompt may be changed
        later by its owner."""
        length = self._length_within(model, prompt, most_bytes)
        if not length:
            return
        kept = replace(prompt, layers=dict(prompt.layers or {}))
        if length < prompt.disk_length:
            kept.cut_back(length, [s for n, s in prompt.snapshots.items() if n <= length])
            kept.disk_length = length
        self._leaving.append(LeavingPrompt(model, kept, _bytes_of(kept, len(kept.tokens))))

    def _length_within(self, model: DiskModel, prompt: CachedPrompt, most_bytes: int) -> int:
        """Returns the length of the longest beginning of the prompt that can be restored and has at
        most so many bytes; 0 if there is none."""
        if _bytes_of(prompt, len(prompt.tokens)) <= most_bytes:
            return prompt.disk_length
        if model.layout.has_states:
            lengths = [n for n in prompt.snapshots if n <= prompt.disk_length]
        else:
            lengths = list(range(self._block, prompt.disk_length + 1, self._block))
        return max((n for n in lengths if _bytes_of(prompt, n) <= most_bytes), default=0)

    def first(self, id: str | None) -> CachedPrompt | None:
        """Returns the prompt that is to be written next. id: the model to which it has to belong;
        None: any."""
        prompts = (each.prompt for each in self._leaving if id in (None, each.model.id))
        return next(prompts, None)

    def model_of(self, prompt: CachedPrompt) -> DiskModel | None:
        """Returns the model of a prompt that is kept here; None for any other prompt."""
        return next((each.model for each in self._leaving if each.prompt is prompt), None)

    def remove(self, prompt: CachedPrompt) -> None:
        self._leaving = [each for each in self._leaving if each.prompt is not prompt]

    def remove_key(self, model: DiskModel, key: str) -> None:
        """Removes the prompts whose files this key has."""
        group = model.group(key)
        self._leaving = [e for e in self._leaving if e.model.group(e.prompt.key) != group]

    def clear(self) -> None:
        self._leaving.clear()


def _bytes_of(prompt: CachedPrompt, length: int) -> int:
    """Returns the bytes of the first `length` tokens, with the snapshots among them."""
    snapshots = sum(each.nbytes for n, each in prompt.snapshots.items() if n <= length)
    return prompt.nbytes * length // len(prompt.tokens) + snapshots


COPIED_BYTES = 32 << 20
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
    """Writes cached prompts to disk, a piece at a time.

    The thread that owns MLX copies some arrays to contiguous ones and does not wait for them. When
    they are computed, another thread writes their memory to a file.
    """

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
            if size >= COPIED_BYTES:
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


LEAST_GAIN = 32
"""Tokens that the disk must have beyond the memory: fewer cost less to compute again."""

TAKEN_BYTES = 64 << 20
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
    """Brings prompts back from disk: a thread reads them while rows of other prompts go on, and
    MLX's thread takes over the arrays a piece at a time.
    """

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
                if taken + items.nbytes > TAKEN_BYTES and taken:
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


IDLE_SECONDS = 1.0
"""The time without a row before prompts are written: the next turn may follow at once, and make the
end of this one superfluous."""

BUSY_SECONDS, OLD_SECONDS = 0.25, 5.0
"""The interval at which one piece is written while rows run, and the age of prompts that are
written then."""


def opened(path: Path, most_bytes: int) -> PromptFolder | None:
    """Opens the folder; returns None, after a log line, if it can't be used."""
    folder = PromptFolder(path, most_bytes)
    try:
        folder.open()
    except FolderInUse:
        log.warning("another server uses the folder of prompt caches: this one uses memory only")
    except OSError as error:
        log.warning("the folder of prompt caches can't be used: %s", public_message(error))
    else:
        return folder
    return None


class DiskTier:
    def __init__(self, folder: PromptFolder, cache: PromptCache, wake: Callable[[], None]) -> None:
        self._folder, self._cache = folder, cache
        self._models = DiskModels()
        self._saver = PromptSaver(folder, self._models, cache, wake)
        self._restorer = PromptRestorer(folder, self._models, cache, wake)
        cache.on_drop = self._keep
        self._ran = self._saved = time.monotonic()
        """The time at which a row last ran, and at which a piece was last written or
        was looked for between rows."""
        self._reported = -1

    def loaded(self, model: str, path: Path, network: nn.Module) -> None:
        self._models.add(model, path, network)

    def unloaded(self, model: str) -> None:
        self._models.forget(model)

    def _keep(self, prompt: CachedPrompt) -> None:
        self._guarded(lambda: self._saver.keep(prompt))

    def forget(self, key: str) -> None:
        """Removes the files of this key, whose values may be invalid."""
        if model := self._models.of(key):
            self._saver.remove(model, key)

    def clear(self) -> None:
        """Drops the prompts that are in the memory of a GPU that has failed."""
        self._saver.clear()

    def begin(self, row: int, key: str, tokens: list[int]) -> bool:
        """Whether the row has to wait until some of its prompt has been read."""
        return self._restorer.begin(row, key, tokens)

    def is_reading(self, row: int) -> bool:
        return self._restorer.is_reading(row)

    def pause(self, *, busy: bool) -> float | None:
        """Returns the seconds until `step` has something to do; None if only another thread gives
        it some."""
        if self._restorer.is_due:
            return 0.0
        if busy or self._saver.is_full or self._saver.next() is None:
            return None
        return max(0.0, self._ran + IDLE_SECONDS - time.monotonic())

    def step(self, *, busy: bool) -> None:
        """Does a piece of work. busy: whether rows are running. Raises errors of the GPU only."""
        self._guarded(lambda: self._step(busy=busy))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs work; what fails is given up, and answers are computed without it."""
        try:
            work()
        except Exception as error:
            self._saver.give_up()
            self._restorer.give_up()
            if device_error(error):
                raise
            log.exception("a prompt could not be written to disk, or read")

    def _step(self, *, busy: bool) -> None:
        now = time.monotonic()
        if busy:
            self._ran = now
        self._restorer.step()
        if busy:
            since, is_time = now - OLD_SECONDS, now - self._saved >= BUSY_SECONDS
        else:
            since, is_time = now, now - self._ran >= IDLE_SECONDS
        if not is_time or self._saver.is_full:
            return
        if prompt := self._saver.next(since=since):
            self._saver.save_piece(prompt)
        if prompt or busy:  # to look takes as long as there are prompts, and rows wait for it
            self._saved = now

    def flush(self, model: str | None = None) -> None:
        """Writes prompts that are about to be dropped. Call it while no row is running."""
        deadline = time.monotonic() + FLUSH_SECONDS
        self._guarded(lambda: self._saver.flush(deadline, model))

    def report(self) -> list[DiskCacheUse]:
        """Returns the events since the latest report, if there are any."""
        reads, self._restorer.reads = self._restorer.reads, DiskReads()
        written, nbytes = self._saver.written_bytes, self._folder.nbytes
        if reads == DiskReads() and not written and nbytes == self._reported:
            return []
        self._reported = nbytes
        return [DiskCacheUse(reads.hits, reads.misses, reads.tokens, reads.nbytes, written, nbytes)]

    def stop(self) -> None:
        """Writes what is not written, and closes the folder."""
        deadline = time.monotonic() + FLUSH_SECONDS
        self._guarded(lambda: self._saver.flush(deadline))
        self._restorer.stop()
        self._saver.stop()
        self._folder.close()


class NoDiskTier(DiskTier):
    """A tier for prompts that are kept in memory only."""

    def __init__(self) -> None:
        pass

    def loaded(self, model: str, path: Path, network: nn.Module) -> None:
        pass

    def unloaded(self, model: str) -> None:
        pass

    def forget(self, key: str) -> None:
        pass

    def clear(self) -> None:
        pass

    def begin(self, row: int, key: str, tokens: list[int]) -> bool:
        return False

    def is_reading(self, row: int) -> bool:
        return False

    def pause(self, *, busy: bool) -> float | None:
        return None

    def step(self, *, busy: bool) -> None:
        pass

    def flush(self, model: str | None = None) -> None:
        pass

    def report(self) -> list[DiskCacheUse]:
        return []

    def stop(self) -> None:
        pass
