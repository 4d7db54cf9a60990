"""Downloads, reads and loads the files of models, and records the errors."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import ModelLoaded
from mlx_server.errors import ModelReplaced, ModelUnusable, ServerError
from mlx_server.pool.disk_threads import DiskThreads
from mlx_server.pool.entry import LoadProgress, OnProgress, PoolEntry
from mlx_server.pool.policy import Policy
from mlx_server.pool.prepare import PreparedModel, check_files, is_current, prepare

log = logging.getLogger("mlx_server.pool")

Report = Callable[[str, int, int], None]
"""Arguments: description of the work, amount done, total amount."""


class ModelPreparation:
    def __init__(
        self,
        disk: DiskThreads,
        engine: Callable[[], EngineClient],
        policy: Callable[[], Policy],
        check_open: Callable[[], None],
        on_progress: OnProgress,
    ) -> None:
        """check_open: raises the error for requests to a server that is stopping."""
        self._disk = disk
        self._engine = engine
        self._policy = policy
        self._check_open = check_open
        self._on_progress = on_progress
        self.upcast = False

    async def prepared(self, entry: PoolEntry) -> PreparedModel:
        """Downloads and reads the model's files, once for all requests. Raises ServerError if they
        can't be used.

        Replaced files are read again while the model is not in memory. A loaded model is served
        unchanged until it is unloaded.
        """
        self._check_open()
        if entry.model:
            return entry.model.prepared
        if entry.preparing:
            await self._forget_if_replaced(entry, entry.preparing)
        if entry.preparing is None:
            entry.preparing = asyncio.create_task(self._prepare(entry))
            # retrieves an error, which is logged already, in case all requests were cancelled
            entry.preparing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(entry.preparing)

    async def _forget_if_replaced(
        self, entry: PoolEntry, known: asyncio.Task[PreparedModel]
    ) -> None:
        is_read = known.done() and not known.cancelled()
        if not is_read or self._policy().state(entry.spec.id) != "unloaded":
            return
        look = partial(is_current, known.result())
        is_replaced = not await self._disk.run_in_turn(entry.spec.id, look)
        if is_replaced and entry.preparing is known:
            log.info("the files of %s were replaced", entry.spec.id)
            entry.preparing = None

    async def _prepare(self, entry: PoolEntry) -> PreparedModel:
        report = self.reporter(entry)
        entry.failure = None
        try:
            ranks = len(group.hosts) if (group := entry.spec.group) else 1
            prepared = await self._disk.run(
                partial(
                    prepare,
                    entry.spec,
                    report,
                    upcast=self.upcast,
                    budget=ranks * self._policy().budget or None,
                    unusable=entry.unusable,
                )
            )
            if prepared.transcript is None:  # a replay model has no KV cache to measure
                with _stamped(prepared):
                    kv = await self._engine().kv_cost(
                        prepared.id, str(prepared.path), prepared.spec.kv_bits
                    )
                weights = prepared.weights // ranks
                most_padding = kv.most_padding(self._policy().budget - weights)
                prepared = replace(prepared, kv=kv, most_padding=most_padding, weights=weights)
        except asyncio.CancelledError:
            self._check_open()
            raise
        except Exception as error:
            entry.preparing = None  # the next request tries again
            failure = self.failed(entry, error)
            raise failure from None
        if prepared.adapters and entry.prepared and entry.prepared.adapters:
            prepared.adapters.added = entry.prepared.adapters.added
        entry.prepared, entry.progress = prepared, None
        self._policy().estimate(entry.spec.id, prepared.weights)
        return prepared

    def failed(self, entry: PoolEntry, error: Exception) -> ServerError:
        """Logs the error, and records in the entry the one to report to clients, which it also
        returns. An unexpected error is only in the log."""
        if isinstance(error, ModelUnusable) and error.stamp:
            entry.unusable, entry.preparing = copy(error), None
        if isinstance(error, ServerError):
            log.error("%s: %s", entry.spec.id, error.message)
        else:
            log.error("%s can't be used", entry.spec.id, exc_info=error)
            error = ServerError(
                f"{entry.spec.id} can't be used because of an unexpected error. See the server's "
                "log."
            )
        entry.failure, entry.progress = copy(error), None
        return error

    async def load(self, prepared: PreparedModel, report: Report) -> ModelLoaded:
        """Loads the weights. Raises ModelReplaced if the files have changed since they were
        prepared."""
        await self._disk.run(partial(check_files, prepared))
        with _stamped(prepared):
            loaded = await self._engine().load(
                prepared.id,
                str(prepared.path),
                lambda done, total: report("loading", done, total),
                sorted(prepared.family.stops(prepared.checkpoint)),
                str(prepared.tokenizer_json.parent),
                prepared.spec.kv_bits,
                prepared.most_padding,
            )
        try:
            await self._disk.run(partial(check_files, prepared))
        except ModelReplaced:
            await self._engine().unload(prepared.id)
            raise
        return loaded

    def reporter(self, entry: PoolEntry) -> Report:
        def report(what: str, done: int, total: int) -> None:
            self._check_open()  # its error ends a download when the server stops
            entry.progress = LoadProgress(what, done, total)
            self._on_progress(entry.spec.id, what, done, total)

        return report


@contextmanager
def _stamped(prepared: PreparedModel) -> Iterator[None]:
    """Gives an error that is due to the model's files their stamp."""
    try:
        yield
    except ModelUnusable as error:
        if error.of_files:
            error.stamp = prepared.stamp
        raise
