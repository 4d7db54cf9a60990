"""uvicorn's HTTP, with an end to its patience: a request has so long to arrive, head and body."""

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_server.api.unread import Unread

AHEAD_BYTES = 64 << 10
"""Of further requests, that a client may send before its answer has come."""


class Http(Unread, H11Protocol):
    receive_seconds: ClassVar[float] = 30.0
    """From its first byte, or from the connection; by the clock, since bytes may drip for ever."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._arrival: asyncio.TimerHandle | None = None
        self._await_arrival()

    def data_received(self, data: bytes) -> None:
        self._await_arrival()
        super().data_received(data)
        self._keep_listening()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        super().handle_websocket_upgrade(event)
        self._arrived()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._arrived()

    def _keep_listening(self) -> None:
        """uvicorn stops reading at a further request, and would not see that the client leaves."""
        ahead, _ = self.conn.trailing_data
        if not ahead or self.conn.their_state is not h11.DONE:
            return
        if len(ahead) > AHEAD_BYTES:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _look(self) -> None:
        has_begun, _ = self.conn.trailing_data
        reads = self.conn.their_state
        is_arriving = reads is h11.SEND_BODY or (reads is h11.IDLE and has_begun)
        is_ours = self.transport.get_protocol() is self  # a WebSocket has one of its own
        if is_arriving and is_ours and not self.transport.is_closing():
            self._await_arrival()
        else:
            self._arrived()

    def _await_arrival(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(self.receive_seconds, self._cut)

    def _cut(self) -> None:
        self.transport.close()

    def _arrived(self) -> None:
        if self._arrival:
            self._arrival.cancel()
            self._arrival = None


def http(receive_seconds: float) -> type[Http]:
    return type("Http", (Http,), {"receive_seconds": receive_seconds})
