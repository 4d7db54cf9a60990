"""The streams between a transport and the SDK's session, and limits of what is received."""

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from mcp.client._transport import TransportStreams as Streams

from mlx_server.limits import MCP_MESSAGE_BRACKETS
from mlx_server.mcp.errors import ConnectionLost

Connect = Callable[[], AbstractAsyncContextManager[Streams]]

__all__ = ["Connect", "Meter", "Streams", "ValueMeter"]

END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class Meter:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._remaining = limit

    def count(self, size: int) -> None:
        """Counts received bytes. Raises ConnectionLost if there are more than the limit."""
        self._remaining -= size
        if self._remaining < 0:
            raise ConnectionLost(f"The server sent more than {self._limit} bytes.")


class ValueMeter:
    """Bounds the values of a message before it is parsed, since a parser holds the interpreter."""

    def __init__(self, *, is_stream: bool = False) -> None:
        """is_stream: whether what is counted are server-sent events, each of which is a message."""
        self._is_stream = is_stream
        self._brackets = self._signs = 0

    def count(self, chunk: bytes) -> None:
        """Counts a part of a message. Raises ConnectionLost if the message has too many values."""
        *ended, last = END_OF_EVENT.split(chunk) if self._is_stream else [chunk]
        for event in ended:
            self._add(event)
            self._brackets = self._signs = 0
        self._add(last)

    def _add(self, part: bytes) -> None:
        self._brackets += part.count(b"[") + part.count(b"{")
        self._signs += part.count(b'"') + part.count(b",")
        most = MCP_MESSAGE_BRACKETS.value
        if self._brackets > most or self._signs > 4 * most:
            raise ConnectionLost(f"The server sent a message of more than {most} values.")
