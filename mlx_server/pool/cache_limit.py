"""The limit on the engine's prompt cache: the memory that models and rows leave to it."""

from collections.abc import Callable
from contextlib import suppress

from mlx_server.engine.client import EngineClient
from mlx_server.errors import EngineDied


class CacheLimit:
    def __init__(self, engine: Callable[[], EngineClient]) -> None:
        self._engine = engine
        self.nbytes = 0
        """The size of the prompt cache, as the engine last reported it."""
        self._sent: int | None = None
        """The limit that was last sent to this engine."""

    def reported(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if nbytes > (self._sent or 0):
            self._sent = None  # a finished row's cache was added: the limit is sent again

    def shrunk(self, to_bytes: int) -> None:
        """Counts on the cache to shrink to `to_bytes`, as the next limit will have it do."""
        self.nbytes = min(self.nbytes, to_bytes)

    def send(self, max_bytes: int) -> None:
        if max_bytes != self._sent:
            with suppress(EngineDied):
                self._engine().limit_cache(max_bytes)
                self._sent = max_bytes

    def engine_lost(self) -> None:
        self.nbytes, self._sent = 0, None
