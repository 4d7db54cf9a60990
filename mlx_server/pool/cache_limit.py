"""The limit of the engine's prompt cache, which may fill the memory that models and rows leave."""

from collections.abc import Callable
from contextlib import suppress

from mlx_server.engine.client import EngineClient
from mlx_server.errors import EngineDied


class CacheLimit:
    def __init__(self, engine: Callable[[], EngineClient]) -> None:
        self._engine = engine
        self.nbytes = 0
        """The bytes of the prompt cache, as the engine last reported them."""
        self._sent: int | None = None
        """The last limit that was sent to this engine; None if it has to be sent again."""

    def reported(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if nbytes > (self._sent or 0):
            self._sent = None  # finished rows added their caches, so the limit has to be sent again

    def shrunk(self, to_bytes: int) -> None:
        """Records the size to which the next limit will shrink the cache."""
        self.nbytes = min(self.nbytes, to_bytes)

    def send(self, max_bytes: int) -> None:
        if max_bytes != self._sent:
            with suppress(EngineDied):
                self._engine().limit_cache(max_bytes)
                self._sent = max_bytes

    def engine_lost(self) -> None:
        self.nbytes, self._sent = 0, None
