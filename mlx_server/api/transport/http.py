"""uvicorn's HTTP protocol with limits on connections, request framing and arrival time."""

import asyncio
import json
import logging
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from websockets.http11 import Request
from websockets.server import ServerProtocol

from mlx_server import limits
from mlx_server.api.transport.admission import Admission, source_of
from mlx_server.api.transport.framing import StrictConnection, upgrade_of
from mlx_server.api.transport.slow_clients import SlowClientGuard
from mlx_server.errors import BadRequest, Overloaded, ServerError

log = logging.getLogger("mlx_server.http")

UNUSED = {h11.IDLE, h11.SEND_RESPONSE}
"""States of h11 in which no response has begun."""


class StrictHttp(SlowClientGuard, H11Protocol):
    receive_seconds: ClassVar[float] = float(limits.RECEIVE_SECONDS)
    """How long a request may take to arrive, from its first byte or from the connection. It is a
    total: a timeout per byte would let a client send one byte at a time for ever."""

    admission: ClassVar[Admission]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._strict = StrictConnection()
        self._arrival: asyncio.TimerHandle | None = None
        self._source = ""
        self._await_arrival()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._source = source_of(self.client[0]) if self.client else ""
        if self.admission.enter(transport, self._source):
            self.admission.is_idle(self, self._source)
        else:
            self._arrived()
            self._refuse(Overloaded("The server has too many connections. Try again later."))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._await_arrival()
        super().data_received(data)
        self._keep_listening()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are not HTTP, at any point of an exchange."""
        if self.cycle and not self.cycle.response_complete:
            # discards what the app still sends
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in UNUSED:
            self._refuse(BadRequest(self._strict.wrong))
        else:
            self.transport.abort()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        if not _is_handshake(event):
            self._refuse(BadRequest("The request is not a valid WebSocket handshake."))
            return
        self._arrived()
        self._stop_deadline()
        self.admission.is_busy(self)
        super().handle_websocket_upgrade(event)
        if self.flow.write_paused:  # the transport does not repeat this for a new protocol
            self.transport.get_protocol().pause_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.admission.is_busy(self)
        self.admission.leave(self.transport)
        self._arrived()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except Exception as error:  # would keep uvicorn from closing the other connections
            log.warning("a connection could not be closed cleanly", exc_info=error)
            self.transport.abort()

    def close_for_another(self) -> None:
        self.transport.abort()

    def _should_upgrade(self) -> bool:
        """Whether to upgrade; uvicorn would log a warning for other protocols, such as HTTP/2."""
        return upgrade_of(self.headers) == b"websocket"

    def _refuse(self, error: ServerError) -> None:
        body = json.dumps(error.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        headers |= {"connection": "close", **error.headers}
        response = h11.Response(
            status_code=error.status,
            headers=list(headers.items()),
            reason=STATUS_PHRASES[error.status],
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _keep_listening(self) -> None:
        """Keeps reading when a second request arrives during the first. uvicorn stops reading then,
        and would not see that the client disconnects."""
        ahead, _ = self.conn.trailing_data
        if not ahead or self.conn.their_state is not h11.DONE:
            return
        if len(ahead) > limits.PIPELINED_BYTES:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _look(self) -> None:
        if self.transport.get_protocol() is not self:  # it has become a WebSocket
            return
        has_begun = bool(self.conn.trailing_data[0])
        reads = self.conn.their_state
        is_unwanted = reads is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if self.transport.is_closing():
            self._arrived()
            self.admission.is_busy(self)
            return
        if reads is h11.SEND_BODY or (reads is h11.IDLE and has_begun):
            self._await_arrival()
        else:
            self._arrived()
        if is_unwanted or (reads is h11.IDLE and has_begun):
            self.admission.is_arriving(self, self._source)
        elif reads is h11.IDLE:
            self.admission.is_idle(self, self._source)
        else:
            self.admission.is_busy(self)

    def _await_arrival(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(self.receive_seconds, self._cut)

    def _cut(self) -> None:
        self.transport.close()

    def _arrived(self) -> None:
        if self._arrival:
            self._arrival.cancel()
            self._arrival = None


def _is_handshake(event: h11.Request) -> bool:
    """Whether the stricter parser of `websockets` accepts the handshake. uvicorn gets no event for
    one that it does not accept, and would keep the connection for ever."""
    lines = [b"%s: %s" % header for header in event.headers]
    head = b"\r\n".join([b"%s %s HTTP/1.1" % (event.method, event.target), *lines, b"", b""])
    trial = ServerProtocol()
    trial.receive_data(head)
    requests = [found for found in trial.events_received() if isinstance(found, Request)]
    return bool(requests) and trial.accept(requests[0]).status_code == 101


def http(receive_seconds: float, admission: Admission) -> type[StrictHttp]:
    return type(
        "StrictHttp", (StrictHttp,), {"receive_seconds": receive_seconds, "admission": admission}
    )
