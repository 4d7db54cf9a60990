"""Limits the bytes that wait for a client that does not read, and how long they wait."""

import asyncio
import socket
from contextlib import suppress
from typing import Any, ClassVar

from mlx_server import limits

LEAST_BYTES = 64 << 10
"""A client that reads less than this within the deadline is cut off."""


class SlowClientGuard(asyncio.Protocol):
    """Mixin in front of a uvicorn protocol: aborts the connection of a client that does not read.

    Closing the connection would wait for the unread bytes. uvicorn sends nothing while bytes are
    unread, so streams pause; after the abort the app sees a disconnect.
    """

    send_seconds: ClassVar[float] = float(limits.SEND_SECONDS)
    transport: asyncio.Transport
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if sock := transport.get_extra_info("socket"):
            with suppress(OSError):  # macOS refuses it for a client that has already left
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.SEND_BUFFER_BYTES)
        transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_deadline()

    def start_deadline(self) -> None:
        unread = self.transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self.send_seconds, self._check_progress, unread)

    def _check_progress(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread > before - LEAST_BYTES:
            self.transport.abort()
        else:
            self.start_deadline()

    def _stop_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None
