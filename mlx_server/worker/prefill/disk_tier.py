"""The prompt store's tier on disk, which survives the eviction of a model and the engine's end.

Prompts are written while no row runs, and in single pieces between the steps of rows; first of all
those that had to leave the memory. What is on disk comes back to the tier in memory before its row
is computed.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_server import limits
from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import FLUSH_SECONDS, DiskCacheUse
from mlx_server.errors import public_message
from mlx_server.models.files import identity_of_model
from mlx_server.prompt_files import (
    PromptFile,
    PromptFolder,
    PromptNames,
    RawTensor,
    encoded,
    group_of,
)
from mlx_server.worker.kernels import device
from mlx_server.worker.prefill.memory_tier import (
    SNAPSHOT_SHARE,
    CachedPrompt,
    Key,
    MemoryTier,
    ids_of,
    superfluous,
)
from mlx_server.worker.prefill.stored_prompt import (
    NAMES,
    TYPES,
    Arrays,
    CacheLayout,
    StoredPrompt,
    arrays_of,
    files_of,
    layers_of,
    layout_of,
    load,
)

log = logging.getLogger("mlx_server.engine")

FORMAT = "2"
"""The version of the files' format. Files of another version are not used."""


@dataclass(frozen=True)
class DiskModel:
    """A loaded model whose prompts can be kept on disk."""

    id: str
    identity: str
    """A digest of the model's files, the versions of MLX and the layout of the caches."""
    layout: CacheLayout

    def group(self, key: Key) -> str:
        """Returns the group of files for this key of the model."""
        return group_of(FORMAT, self.identity, *map(str, key[1:]))


def disk_model(id: str, path: Path, network: nn.Module) -> DiskModel | None:
    """Returns None, perhaps after a log line, if the model has to work without files."""
    try:
        if layout := layout_of(network):
            versions = (version("mlx"), version("mlx-lm"), device())
            files = identity_of_model(path)
            return DiskModel(id, group_of(files, *versions, layout.describe()), layout)
    except Exception as error:
        log.warning("the prompt caches of %s are not kept on disk: %s", id, public_message(error))
    return None


Models = Mapping[str, DiskModel]
"""The models that have files, by their id."""

COPIED_BYTES = 32 << 20
"""The bytes that are copied at a time."""

LEAVING_SHARE = 64
"""Prompts that left the memory tier keep at most MLX's memory limit divided by this, since the
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
        self, folder: PromptFolder, models: Models, memory: MemoryTier, wake: Callable[[], None]
    ) -> None:
        """wake: called in another thread when a file has been written."""
        self._folder, self._models, self._memory, self._wake = folder, models, memory, wake
        self._thread = ThreadPoolExecutor(1, "prompt-writer")
        self._writes: deque[Write] = deque()
        self._leaving: dict[CachedPrompt, DiskModel] = {}
        """The prompts that left the memory tier before they were written, for example because a row
        needed their memory: they keep that until then. And the models that computed them, which may
        be unloaded by now."""
        self._prompt: CachedPrompt | None = None
        self._work: Iterator[None] = iter(())
        self._misfits: set[str] = set()
        """The models with caches of an unexpected shape."""
        self._paused_until = 0.0
        self._is_refused = False
        """Whether the last file could not be written, which has been logged."""

    @property
    def is_full(self) -> bool:
        """Whether the bytes that wait for the disk have reached their limit."""
        while self._writes and self._writes[0].future.done():
            self._writes.popleft()
        return self._copied_bytes >= limits.PROMPT_WRITE_BYTES

    @property
    def _copied_bytes(self) -> int:
        return sum(write.nbytes for write in self._writes if not write.future.done())

    @property
    def leaving_bytes(self) -> int:
        return sum(prompt.bytes_until(len(prompt.tokens)) for prompt in self._leaving)

    def keep(self, prompt: CachedPrompt) -> None:
        """Keeps a prompt that leaves the memory tier until it is written: as much of its beginning
        as there is room for among what waits for the disk."""
        if (model := self._model_of(prompt)) is None or time.monotonic() < self._paused_until:
            return
        most = min(limits.PROMPT_WRITE_BYTES, mx.get_memory_limit() // LEAVING_SHARE)
        room, length = most - self._copied_bytes - self.leaving_bytes, prompt.disk_length
        leaving = replace(prompt, layers=dict(prompt.layers or {}))  # its owner may change it
        if prompt.bytes_until(len(prompt.tokens)) > room:
            block = self._folder.block
            places = prompt.snapshots if model.layout.rest else range(block, length + 1, block)
            fitting = (n for n in places if n <= length and prompt.bytes_until(n) <= room)
            if not (length := max(fitting, default=0)):
                return
            leaving.cut_back(length, [each for n, each in prompt.snapshots.items() if n <= length])
            leaving.disk_length = length
        self._leaving[leaving] = model

    def next(self, id: str | None = None, since: float = float("inf")) -> CachedPrompt | None:
        """Returns the prompt that is written now or next. id: the model to which it has to belong;
        None: any. since: the time before which it was last used, unless it leaves the memory."""
        if self._prompt and (self._prompt in self._memory or self._prompt in self._leaving):
            return self._prompt
        self._prompt, self._work = None, iter(())
        for prompt, owner in self._leaving.items():
            if id in (None, owner.id):
                return prompt
        for prompt in self._memory.unsaved():
            if (model := self._model_of(prompt)) is None:
                prompt.is_saved = True
            elif prompt.since <= since and id in (None, model.id):
                return prompt
        return None

    def _model_of(self, prompt: CachedPrompt) -> DiskModel | None:
        return self._leaving.get(prompt) or self._models.get(str(prompt.key[0]))

    def save_piece(self, prompt: CachedPrompt) -> None:
        """Copies a piece of the prompt that `next` returned, or submits one for writing."""
        if prompt is not self._prompt and (model := self._model_of(prompt)):
            self._prompt, self._work = prompt, self._saving(model, prompt)
        if next(self._work, self) is self:
            self.give_up()

    def give_up(self) -> None:
        """Ends the work on the prompt that is being written."""
        if self._prompt:
            self._prompt.is_saved = True
            self._leaving.pop(self._prompt, None)
        self._prompt, self._work = None, iter(())

    def clear(self) -> None:
        """Drops the prompts that left the memory tier: the failed GPU may have lost their
        values."""
        self._leaving.clear()

    def flush(self, deadline: float, id: str | None = None) -> None:
        """Writes what is not written, and waits for the files until `deadline`, a time of
        `time.monotonic`: later lookups find only finished files. id: the model whose prompts and
        files alone are meant."""
        while time.monotonic() < deadline and (prompt := self.next(id)):
            if self.is_full:
                wait([self._writes[0].future], deadline - time.monotonic())
            else:
                self.save_piece(prompt)
        futures = [write.future for write in self._writes if id in (None, write.model)]
        wait(futures, max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        self._thread.shutdown(wait=True)

    def remove(self, model: DiskModel, key: Key) -> None:
        """Removes a key's files after the writes so far, also while the disk takes no others."""
        group = model.group(key)
        leaving = self._leaving.items()
        self._leaving = {p: owner for p, owner in leaving if owner.group(p.key) != group}
        self._submit(model, lambda: self._folder.remove_if(lambda file: file.group == group))

    def _submit(self, model: DiskModel, work: Callable[[], None], nbytes: int = 0) -> None:
        future = self._thread.submit(work)
        self._writes.append(Write(model.id, future, nbytes))
        future.add_done_callback(lambda done: self._wake())

    def _guarded(self, work: Callable[[], object]) -> None:
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
        ids = prompt.tokens[: prompt.disk_length]
        names = self._folder.names(model.group(prompt.key), ids)
        files = names.blocks if model.layout.cut else []
        lengths, dropped = self._states(model, prompt, names)
        files += [names.state(length) for length in lengths]
        for file in files:
            if file not in self._folder:
                yield from self._save(model, prompt, file)
        self._submit(model, partial(self._guarded, partial(self._tidy, files, dropped)))

    def _states(
        self, model: DiskModel, prompt: CachedPrompt, names: PromptNames
    ) -> tuple[list[int], list[PromptFile]]:
        """Returns the lengths at which states are kept, and the other prompts' files that these
        make superfluous."""
        known = {file.length: file for file in self._folder.states_of(names)}
        length, expected = len(names.ids), (prompt.shared, prompt.continued_from)
        if not model.layout.rest:  # blocks have all tokens but the last of each beginning
            ends = {n for n in (*expected, length) if 0 < n <= length and n % self._folder.block}
            return sorted(ends), [file for n, file in known.items() if n not in ends]
        new_sizes = {n: each.nbytes for n, each in prompt.snapshots.items() if n <= length}
        sizes = new_sizes | {n: self._folder.size_of(file) for n, file in known.items()}
        most_bytes = self._folder.most_bytes // SNAPSHOT_SHARE
        unwanted = superfluous(sizes, most_bytes, expected)
        lengths = [n for n in sorted(new_sizes) if n not in unwanted]
        return lengths, [file for n, file in known.items() if n in unwanted]

    def _tidy(self, used: Sequence[PromptFile], dropped: Sequence[PromptFile]) -> None:
        self._folder.remove_unread(dropped)
        self._folder.touch(used)

    def _save(self, model: DiskModel, prompt: CachedPrompt, file: PromptFile) -> Iterator[None]:
        begin = file.begin(self._folder.block)
        cut = arrays_of(prompt.layers or {}).items()
        arrays = {name: array[:, :, begin : file.length] for name, array in cut}
        if file.tail and model.layout.rest:
            arrays |= arrays_of(prompt.snapshots[file.length].layers)
        shapes = {name: (NAMES.get(a.dtype, ""), a.shape) for name, a in arrays.items()}
        if not model.layout.fits(file, file.length - begin, shapes):
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
        ids = prompt.tokens[begin : file.length]
        pieces = encoded(file, ids, model.id, tensors)
        write = partial(self._guarded, partial(self._folder.write, file, pieces))
        self._submit(model, write, sum(piece.nbytes for piece in pieces))

    def _log_misfit(self, model: str) -> None:
        if model not in self._misfits:
            self._misfits.add(model)
            log.warning(
                "a prompt cache of %s has an unexpected shape, so it is not written to disk. This "
                "is logged only once.",
                model,
            )


def _raw_tensor(array: mx.array, raw: mx.array) -> RawTensor:
    data = memoryview(raw) if raw.size else memoryview(b"")  # type: ignore[arg-type]
    return RawTensor(NAMES[array.dtype], array.shape, data)


LEAST_GAIN = 32
"""Tokens that the disk must have beyond the memory: fewer cost less to compute again."""

TAKEN_BYTES = 64 << 20
"""The bytes that are taken over at a time, if no single array is larger."""


@dataclass(frozen=True)
class PromptRead:
    """A row's request for what the disk has of its prompt."""

    row: int
    key: Key
    tokens: list[int]
    model: DiskModel
    names: PromptNames


class PromptRestorer:
    """Brings prompts back from disk: a thread reads them while rows of other prompts go on, and
    MLX's thread takes over the arrays a piece at a time.
    """

    def __init__(
        self, folder: PromptFolder, models: Models, memory: MemoryTier, wake: Callable[[], None]
    ) -> None:
        self._folder, self._models, self._memory, self._wake = folder, models, memory, wake
        self._thread = ThreadPoolExecutor(1, "prompt-reader")
        self._waiting: deque[PromptRead] = deque()
        self._read: PromptRead | None = None
        self._loading: Future[StoredPrompt | None] | None = None
        self._work: Iterator[None] | None = None
        self.use = DiskCacheUse()
        """The lookups since the latest report."""

    def stop(self) -> None:
        self._thread.shutdown(wait=True)

    def begin(self, row: int, key: Key, tokens: list[int]) -> bool:
        """Whether the disk has more of this prompt than the memory; the row then waits for it."""
        model = self._models.get(str(key[0]))
        if model is None or len(tokens) < LEAST_GAIN:
            return False
        names = self._folder.names(model.group(key), ids_of(tokens))
        read = PromptRead(row, key, tokens, model, names)
        if not self._may_gain(read):
            self.use.misses += len(tokens) - self._memory.known(key, tokens) >= LEAST_GAIN
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
        if self._read and self._loading and self._loading.done():
            self._take(self._read, self._loading)
        if self._work is not None and next(self._work, self) is self:
            self._read = self._work = None
        while self._read is None and self._waiting:
            self._load(self._waiting.popleft())

    def _gain(self, read: PromptRead) -> int:
        """Returns the number of tokens that the disk has beyond the memory."""
        if self._models.get(read.model.id) is not read.model:  # it was unloaded
            return 0
        files = files_of(self._folder, read.model.layout, read.names)
        return files[-1].length - self._memory.known(read.key, read.tokens) if files else 0

    def _may_gain(self, read: PromptRead) -> bool:
        """Whether the disk has enough, or may have since another server has written to it: a block
        is looked for by its name, but a state of any length may be there, which only a scan
        finds."""
        self._folder.find(read.names)
        may_have_states = bool(read.model.layout.rest_layers) and self._folder.is_stale
        return may_have_states or self._gain(read) >= LEAST_GAIN

    def _load(self, read: PromptRead) -> None:
        if not self._may_gain(read):
            return
        least = self._memory.known(read.key, read.tokens) + LEAST_GAIN
        self._read = read
        self._loading = self._thread.submit(self._loaded, read, least)
        self._loading.add_done_callback(lambda done: self._wake())

    def _loaded(self, read: PromptRead, least: int) -> StoredPrompt | None:
        with self._folder.reading():
            if read.model.layout.rest_layers:
                self._folder.refresh()
            return load(self._folder, read.model.layout, read.names, least)

    def _take(self, read: PromptRead, loading: Future[StoredPrompt | None]) -> None:
        self._loading = None
        stored = loading.result() if loading.exception() is None else None
        if stored is None:
            self.use.misses += 1
            self._read = None
            return
        if stored.nbytes <= self._memory.max_bytes:
            self._memory.shrink(self._memory.max_bytes - stored.nbytes)
        self._work = self._taking(read, stored)

    def _taking(self, read: PromptRead, stored: StoredPrompt) -> Iterator[None]:
        """Yields after each large piece."""
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
        if self._models.get(read.model.id) is read.model:
            length, layout = stored.length, read.model.layout
            known = self._memory.known(read.key, read.tokens)
            self._memory.put_back(
                read.row,
                read.key,
                read.names.ids[:length].copy(),
                layers_of(layout.cut_layers, cut, length),
                layers_of(layout.rest_layers, rest, length),
            )
            self.use.hits += 1
            self.use.tokens += length - known
            self.use.read_bytes += stored.nbytes


IDLE_SECONDS = 1.0
"""The time without a row before prompts are written: the next turn may follow at once, and make the
end of this one superfluous."""

BUSY_SECONDS, OLD_SECONDS = 0.25, 5.0
"""The interval at which one piece is written while rows run, and the age of prompts that are
written then."""


def opened(path: Path, most_bytes: int, writes_per_day: int) -> PromptFolder | None:
    """Opens the folder; returns None, after a log line, if it can't be used."""
    folder = PromptFolder(path, most_bytes, writes_per_day=writes_per_day)
    try:
        folder.open()
    except OSError as error:
        log.warning("the folder of prompt caches can't be used: %s", public_message(error))
    else:
        return folder
    return None


class DiskTier:
    """Without a folder it keeps nothing."""

    def __init__(
        self, folder: PromptFolder | None, memory: MemoryTier, wake: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._models: dict[str, DiskModel] = {}
        files = folder or PromptFolder(Path(), 0)  # no model has any then
        self.saver = PromptSaver(files, self._models, memory, wake)
        self.restorer = PromptRestorer(files, self._models, memory, wake)
        memory.on_drop = self._keep
        self._ran = self._saved = time.monotonic()
        """The time at which a row last ran, and at which a piece was last written or
        was looked for between rows."""
        self._reported, self._reported_written = -1, 0
        """The bytes on disk and the bytes written, as of the latest report."""

    def loaded(self, id: str, path: Path, network: nn.Module) -> None:
        if self._folder and (model := disk_model(id, path, network)):
            self._models[id] = model

    def unloaded(self, id: str) -> None:
        self._models.pop(id, None)

    def _keep(self, prompt: CachedPrompt) -> None:
        self._guarded(lambda: self.saver.keep(prompt))

    def forget(self, key: Key) -> None:
        """Removes the files of this key, whose values may be invalid."""
        if model := self._models.get(str(key[0])):
            self.saver.remove(model, key)

    def pause(self, *, busy: bool) -> float | None:
        """Returns the seconds until `step` has something to do; None if only another thread gives
        it some."""
        if self.restorer.is_due:
            return 0.0
        if busy or self.saver.is_full or self.saver.next() is None:
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
            self.saver.give_up()
            self.restorer.give_up()
            if device_error(error):
                raise
            log.exception("a prompt could not be written to disk, or read")

    def _step(self, *, busy: bool) -> None:
        now = time.monotonic()
        if busy:
            self._ran = now
        self.restorer.step()
        if busy:
            since, is_time = now - OLD_SECONDS, now - self._saved >= BUSY_SECONDS
        else:
            since, is_time = now, now - self._ran >= IDLE_SECONDS
        if not is_time or self.saver.is_full:
            return
        if prompt := self.saver.next(since=since):
            self.saver.save_piece(prompt)
        if prompt or busy:  # to look takes as long as there are prompts, and rows wait for it
            self._saved = now

    def flush(self, id: str | None = None, seconds: float = FLUSH_SECONDS) -> None:
        """Writes prompts that are about to be dropped. Call it while no row is running. id: the
        model to which they belong; None: any."""
        deadline = time.monotonic() + seconds
        self._guarded(lambda: self.saver.flush(deadline, id))

    def report(self) -> list[DiskCacheUse]:
        """Returns the events since the latest report, if there are any."""
        if self._folder is None:
            return []
        use, self.restorer.use = self.restorer.use, DiskCacheUse()
        written, use.nbytes = self._folder.written, self._folder.nbytes
        use.written_bytes = written - self._reported_written
        if use == DiskCacheUse(nbytes=self._reported):
            return []
        self._reported, self._reported_written = use.nbytes, written
        return [use]

    def stop(self) -> None:
        """Writes what is not written."""
        self.flush()
        self.restorer.stop()
        self.saver.stop()
