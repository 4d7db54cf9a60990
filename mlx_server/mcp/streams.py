"""The streams between a transport and the SDK's session, and the limit of received bytes."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from mcp.client._transport import TransportStreams as Streams

from mlx_server.mcp.errors import ConnectionLost

Connect = Callable[[], AbstractAsyncContextManager[Streams]]

__all__ = ["Connect", "Meter", "Streams"]


class Meter:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._remaining = limit

    def count(self, size: int) -> None:
        """Counts received bytes. Raises ConnectionLost if there are more than the limit."""
        self._remaining -= size
        if self._remaining < 0:
            raise ConnectionLost(f"The server sent more than {self._limit} bytes.")
