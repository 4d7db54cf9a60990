"""Waits for the engine's replies to the server's commands."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from mlx_server.engine import messages
from mlx_server.errors import AdapterInvalid, ModelUnusable, ServerError


class PendingReplies:
    """Futures of replies, by a key: the command's type, and the names of its model and adapter.

    The replies to one key come in the order of its commands. No two commands share a reply: what
    one of them loaded may be unloaded by the next.
    """

    def __init__(self) -> None:
        self._futures: dict[Hashable, deque[asyncio.Future[Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    async def next(self, key: Hashable, send: Callable[[], None]) -> Any:
        """Sends a command and waits for its reply, which comes even if the caller is cancelled."""
        send()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # A cancelled caller never reads the exception; reading it here avoids a warning.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._futures.setdefault(key, deque()).append(future)
        return await asyncio.shield(future)

    def settle(self, report: messages.Report) -> None:
        """Gives a report to the command that it replies to, if it replies to one."""
        match report:
            case messages.ModelLoaded(model):
                self._succeed((messages.LoadModel, model), report)
            case messages.ModelLoadFailed(model, message, of_files):
                error = _unusable(model, message)
                error.of_files = of_files
                self._fail((messages.LoadModel, model), error)
            case messages.ModelUnloaded(model):
                self._succeed((messages.UnloadModel, model))
            case messages.CacheMeasured(model, cost):
                self._succeed((messages.MeasureCache, model), cost)
            case messages.CacheNotMeasured(model, message):
                self._fail((messages.MeasureCache, model), _unusable(model, message))
            case messages.AdapterLoaded(model, adapter):
                self._succeed((messages.LoadAdapter, model, adapter), report)
            case messages.AdapterFailed(model, adapter, message):
                invalid = AdapterInvalid(f"The adapter can't be used: {message}")
                self._fail((messages.LoadAdapter, model, adapter), invalid)
            case messages.AdapterUnloaded(model, adapter):
                self._succeed((messages.UnloadAdapter, model, adapter))

    def _succeed(self, key: Hashable, reply: Any = None) -> None:
        self._pop(key).set_result(reply)

    def _fail(self, key: Hashable, error: ServerError) -> None:
        self._pop(key).set_exception(error)

    def fail_all(self, error: ServerError) -> None:
        for futures in self._futures.values():
            for future in futures:
                future.set_exception(error)
        self._futures.clear()

    def _pop(self, key: Hashable) -> asyncio.Future[Any]:
        futures = self._futures[key]
        future = futures.popleft()
        if not futures:
            del self._futures[key]
        return future


def _unusable(model: str, message: str) -> ModelUnusable:
    return ModelUnusable(f"Model {model!r} can't be loaded: {message}")
