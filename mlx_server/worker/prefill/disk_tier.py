"""The prompt cache's tier on disk, which survives the eviction of a model and the engine's end.

Prompts are written while no row runs, and in single pieces between the steps of rows; first of all
those that had to leave the memory. What is on disk comes back to the prompt cache in memory before
its row is computed.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn

from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import FLUSH_SECONDS, DiskCacheUse
from mlx_server.errors import public_message
from mlx_server.prompt_files.folder import FolderInUse, PromptFolder
from mlx_server.worker.prefill.cached_prompt import CachedPrompt
from mlx_server.worker.prefill.disk_models import DiskModels
from mlx_server.worker.prefill.prompt_cache import PromptCache
from mlx_server.worker.prefill.prompt_restorer import DiskReads, PromptRestorer
from mlx_server.worker.prefill.prompt_saver import PromptSaver

log = logging.getLogger("mlx_server.engine")

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
