"""Renders the likely next prompts of conversations, which the engine computes while it is idle."""

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
        """Renders the beginning of a next prompt in a thread and sends it to the engine. Does
        nothing if the maximum number of prompts is being rendered already."""
        if len(self.rendering) < limits.PROMPTS_AHEAD:
            self.rendering.begin(self._send(model, render))

    async def _send(self, model: str, render: Callable[[], ComputeAhead]) -> None:
        try:
            self._engine().compute_ahead(await in_thread(render, model=model))
        except ServerError:
            pass  # the template or context takes no further message, or the server is busy
        except Exception:
            log.exception("the next prompt of a conversation can't be rendered")
