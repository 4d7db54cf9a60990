"""Conversations' next prompts, which the engine computes while it is idle."""

import logging
from collections.abc import Callable

from mlx_server import limits
from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import ComputeAhead
from mlx_server.errors import ServerError
from mlx_server.pool.background import BackgroundWork
from mlx_server.request_threads import in_thread

log = logging.getLogger("mlx_server.pool")


class NextPrompts:
    def __init__(self, engine: Callable[[], EngineClient]) -> None:
        self._engine = engine
        self.rendering = BackgroundWork()

    def begin(self, model: str, render: Callable[[], ComputeAhead]) -> None:
        """Sends the engine the beginning of a next prompt after `render`, which runs in a thread.
        Does nothing if as many are being rendered as may be."""
        if len(self.rendering) < limits.PROMPTS_AHEAD.value:
            self.rendering.begin(self._send(model, render))

    async def _send(self, model: str, render: Callable[[], ComputeAhead]) -> None:
        try:
            self._engine().compute_ahead(await in_thread(render, model=model))
        except ServerError:
            pass  # no next message fits the template or the context, or the server is busy
        except Exception:
            log.exception("the next prompt of a conversation can't be rendered")
