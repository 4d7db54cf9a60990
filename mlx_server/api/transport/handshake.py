"""Limits the time of a WebSocket's handshake, and frees its place when it closes."""

import asyncio
import logging
from typing import Any, ClassVar, TypeVar

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mlx_server import limits
from mlx_server.api.transport.admission import Admission

log = logging.getLogger("mlx_server.http")

W = TypeVar("W", bound=WebSocketsSansIOProtocol)


class Handshake(WebSocketsSansIOProtocol):
    """Mixin in front of a WebSocket protocol."""

    receive_seconds: ClassVar[float] = float(limits.RECEIVE_SECONDS)
    admission: ClassVar[Admission]
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.receive_seconds, self.transport.abort)

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.handshake_complete or self.close_sent:
            self._stop_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self.admission.leave(self.transport)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except Exception as error:  # would keep uvicorn from closing the other connections
            log.warning("a WebSocket could not be closed cleanly", exc_info=error)
            self.transport.abort()

    def _stop_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None


def handshaking(protocol: type[W], receive_seconds: float, admission: Admission) -> type[W]:
    limited = {"receive_seconds": receive_seconds, "admission": admission}
    return type(protocol.__name__, (Handshake, protocol), limited)
