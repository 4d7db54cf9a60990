"""What a client does not read: little of it is kept, and not for long."""

import asyncio
import socket
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from mlx_server import limits

P = TypeVar("P", bound=asyncio.Protocol)

LEAST_BYTES = 64 << 10
"""Whoever reads less of a long answer in the time there is does not read."""


class SlowClientGuard(asyncio.Protocol):
    """Before one of uvicorn's protocols: cuts the connection of a client that does not read.

    Closing it would not do: that waits for what is unread. uvicorn sends nothing more while
    something is, so streams pause, and hears of the cut as if the client had left.
    """

    send_seconds: ClassVar[float] = float(limits.SEND_SECONDS.value)
    transport: asyncio.Transport
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if sock := transport.get_extra_info("socket"):
            with suppress(OSError):  # macOS refuses it for a client that has already left
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.SEND_BUFFER_BYTES.value)
        transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_deadline()

    def _start_deadline(self) -> None:
        left = self.transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self.send_seconds, self._check_progress, left)

    def _check_progress(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left > before - LEAST_BYTES:
            self.transport.abort()
        else:
            self._start_deadline()

    def _stop_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None


def guard_slow_clients(protocol: type[P], send_seconds: float) -> type[P]:
    return type(protocol.__name__, (protocol,), {"send_seconds": send_seconds})
