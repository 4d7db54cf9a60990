"""The protocol of an HTTP connection: it refuses message framing that h11 accepts but a proxy might
read differently, and closes connections that send or read too slowly.

If two servers disagree on where a request ends, a second request can be smuggled in its body.
"""

import asyncio
import json
import logging
import re
import socket
from contextlib import suppress
from typing import Any, ClassVar

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from websockets.http11 import Request
from websockets.server import ServerProtocol

from mlx_server import limits
from mlx_server.errors import BadRequest, Overloaded, ServerError
from mlx_server.http.admission import Admission, source_of
from mlx_server.http.middleware import is_upload

log = logging.getLogger("mlx_server.http")

BARE_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)")
HEAD_END = re.compile(rb"\n\r?\n")
FOLDED_LINE = re.compile(rb"\n[ \t]")

CLOSE = b"connection", b"close"

SMALL_BYTES = 256
"""Chunks smaller than this are counted and limited: each costs the event loop time."""

Received = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]


TLS_HANDSHAKE = b"\x16\x03"
TLS = "A client used https:// here, but this port speaks plain HTTP: use http:// in its URL."


class StrictChunks(ChunkedReader):
    """Refuses trailers whose lines another reader could end elsewhere, as `_framing_error` does for
    heads."""

    def __call__(self, buf: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        if not self._reading_trailer:
            return super().__call__(buf)
        before = bytes(buf)
        event = super().__call__(buf)
        trailers = before[: len(before) - len(buf)]
        if BARE_LINE_END.search(trailers) or FOLDED_LINE.search(trailers):
            raise h11.RemoteProtocolError("a line of the trailers does not end with CR LF")
        return event


class StrictConnection(h11.Connection):
    wrong = "The request is not valid HTTP."
    """Message for the client about the last refused event."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, limits.HEAD_BYTES)
        self._small_chunks = 0

    def next_event(self) -> Received:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        self._refuse_if(TLS if before.startswith(TLS_HANDSHAKE) else _wrong_with_size(before))
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._small_chunks = 0
            after = self.trailing_data[0]
            self._refuse_if(_framing_error(event, before[: len(before) - len(after)], after))
            if isinstance(self._reader, ChunkedReader):
                self._reader = StrictChunks()
        elif isinstance(event, h11.Data):
            is_whole = event.chunk_start and event.chunk_end
            self._small_chunks += is_whole and len(event.data) < SMALL_BYTES
            if self._small_chunks > limits.SMALL_CHUNKS:
                self._refuse_if(
                    f"The body has too many small chunks: send {SMALL_BYTES} bytes or more in each."
                )
        elif isinstance(event, h11.EndOfMessage):
            self._refuse_if(_too_many(len(event.headers)))
        return event

    def _refuse_if(self, wrong: str | None) -> None:
        if wrong:
            self.wrong = wrong
            raise h11.RemoteProtocolError(wrong)


def _wrong_with_size(received: bytes) -> str | None:
    """Checks the head in `received`, which may be incomplete, before the costly parsing. h11 itself
    accepts a head of any length if it arrives at once."""
    end = HEAD_END.search(received)
    head = received[: end.start()] if end else received
    if len(head) > limits.HEAD_BYTES:
        return f"The request head is larger than {limits.HEAD_BYTES} bytes."
    return _too_many(head.count(b"\n"))


def _too_many(lines: int) -> str | None:
    if lines > limits.HEADERS:
        return f"The request has more than {limits.HEADERS} header lines."
    return None


def _framing_error(request: h11.Request, head: bytes, after: bytes) -> str | None:
    headers = dict(request.headers)
    if BARE_LINE_END.search(head):
        return "Each line of a request's head must end with CR LF."
    if FOLDED_LINE.search(head):
        return "A header must not be continued on a second line."
    if not request.http_version.startswith(b"1."):
        return "This server only supports HTTP/1.1 and 1.0."
    if b"transfer-encoding" in headers:
        if b"content-length" in headers:
            return "A request must not have both Content-Length and Transfer-Encoding."
        if request.http_version < b"1.1":
            return "HTTP/1.0 has no Transfer-Encoding."
    upgrade = upgrade_of(request.headers)
    # Java's client and curl offer HTTP/2 with each request; the offer is ignored, body or not
    is_http2_offer = upgrade == b"h2c" and b"http2-settings" in headers
    if upgrade and _has_body(headers, after) and not is_http2_offer:
        return "A request with Upgrade must not have a body."
    return None


def upgrade_of(headers: h11._headers.Headers | list[tuple[bytes, bytes]]) -> bytes | None:
    """The protocols of an Upgrade header, in lower case; None without an upgrade."""
    options = [
        option.strip().lower()
        for name, value in headers
        if name == b"connection"
        for option in value.split(b",")
    ]
    protocols = [value.strip().lower() for name, value in headers if name == b"upgrade"]
    return b", ".join(protocols) if protocols and b"upgrade" in options else None


def _has_body(headers: dict[bytes, bytes], after: bytes) -> bool:
    """Whether there is a body, or bytes `after` the head, which a client that asks for an upgrade
    must not send before the answer."""
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or length != b"0" or bool(after)


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

    def shutdown(self) -> None:
        try:
            super().shutdown()  # type: ignore[misc]
        except Exception as error:  # would keep uvicorn from closing the other connections
            log.warning("a connection could not be closed cleanly", exc_info=error)
            self.transport.abort()

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


UNUSED = {h11.IDLE, h11.SEND_RESPONSE}
"""States of h11 in which no response has begun."""


class StrictHttp(SlowClientGuard, H11Protocol):
    receive_seconds: ClassVar[float] = float(limits.RECEIVE_SECONDS)
    """How long a request may take to arrive, from its first byte or from the connection. It is a
    total: a timeout per byte would let a client send one byte at a time for ever. An upload gets it
    again for each MiB."""

    admission: ClassVar[Admission]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._strict = StrictConnection()
        self._arrival: asyncio.TimerHandle | None = None
        self._received = 0
        """Bytes since the timer was set."""
        self._is_leaving = False
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
        self._received += len(data)
        super().data_received(data)
        self._close_after_answer()
        self._keep_listening()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are not HTTP, at any point of an exchange."""
        if self._strict.wrong is TLS:  # such a client can't read the answer
            log.warning(TLS)
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

    def leave(self) -> None:
        """Closes the connection with its present answer, or with the next one. One that stays idle
        is closed as any other."""
        self._is_leaving = True
        self._close_after_answer()

    def _close_after_answer(self) -> None:
        if self._is_leaving and self.cycle and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            if CLOSE not in self.headers:  # those of the request; uvicorn's answer repeats it
                self.headers.append(CLOSE)

    def shutdown(self) -> None:
        if not self._is_leaving or (self.cycle and not self.cycle.response_complete):
            super().shutdown()

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
            self._received = 0
            self._arrival = self.loop.call_later(self.receive_seconds, self._cut)

    def _cut(self) -> None:
        unanswered = self.conn.our_state in UNUSED and self.cycle is not None
        if unanswered and self._received >= limits.UPLOAD_BYTES and is_upload(self.cycle.scope):
            self._arrival = None
            self._await_arrival()
        else:
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
    requests = [each for each in trial.events_received() if isinstance(each, Request)]
    return bool(requests) and trial.accept(requests[0]).status_code == 101


def http(receive_seconds: float, admission: Admission) -> type[StrictHttp]:
    return type(
        "StrictHttp", (StrictHttp,), {"receive_seconds": receive_seconds, "admission": admission}
    )
