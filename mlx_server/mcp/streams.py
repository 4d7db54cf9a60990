"""What a transport gives to the SDK's session, and how much may come through it."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from mcp.client._transport import TransportStreams as Streams

from mlx_server.mcp.errors import ConnectionLost

Connect = Callable[[], AbstractAsyncContextManager[Streams]]

__all__ = ["Connect", "Meter", "Streams"]


class Meter:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ConnectionLost(f"It sent more than {self._limit} bytes.")
