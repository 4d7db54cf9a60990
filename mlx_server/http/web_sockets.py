"""The protocol of WebSockets, with limits on their number, their frames and the memory that all of
them share."""

import asyncio
import select
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar, TypeVar

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from mlx_server import limits
from mlx_server.errors import Overloaded
from mlx_server.http.admission import Admission
from mlx_server.http.connections import SlowClientGuard
from mlx_server.request_threads import in_thread
from mlx_server.system import descriptors
from mlx_server.system.shared_budget import ClientCounts, SharedBudget

T = TypeVar("T")

CLOSE_SECONDS = 0.5
"""How long a client gets to read the last bytes before the server closes."""
CLOSING_SECONDS = 2.0
"""How long a client gets to answer a close frame."""

PEER_SECONDS = 1.0
"""Interval of the checks for a disconnected client while reading is paused."""
HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
"""Linux has a separate flag for a peer that has closed its side; macOS reports POLLHUP."""

POLICY_VIOLATION = 1008


class OpenSockets:
    """Counts and limits the WebSockets, of each client and in total."""

    def __init__(self) -> None:
        self._open = ClientCounts()

    def one_more(self, client: str) -> AbstractContextManager[None]:
        """`client` is the digest of its key or else its address. Raises Overloaded at a limit."""
        # a quarter of the process's descriptors; the rest is for requests, files and models
        most = max(1, min(limits.SOCKETS, descriptors.available() // 4))
        most_of_one = min(limits.SOCKETS_PER_CLIENT, (most + 1) // 2)
        if self._open.total >= most:
            raise Overloaded(
                f"All {most} WebSockets of this server are in use. Try again later, or send "
                "requests over HTTP.",
                code="too_many_websockets",
            )
        if self._open.of(client) >= most_of_one:
            raise Overloaded(
                f"You have {most_of_one} open WebSockets, the limit for one client. Close one of "
                "them, or send requests over HTTP.",
                code="too_many_websockets",
            )
        return self._open.one_more(client)


PARSED_BYTES = 8 << 10
"""Bytes that are parsed before their frames are counted: a frame may have six."""

SMALL_BYTES = 256
"""The size below which a fragment is counted, since it takes as long as a larger one."""


class ReceivedMessage:
    """A complete message from a client, in bytes: as text it can take four times the memory."""

    def __init__(
        self,
        data: bytes,
        *,
        is_text: bool,
        on_release: Callable[[], None] = lambda: None,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.data = data
        self.is_text = is_text
        self._on_release, self._on_finish = on_release, on_finish
        self._reading: asyncio.Future[Any] | None = None

    async def read(self, work: Callable[[bytes], T]) -> T:
        """Runs `work` in a thread. The thread goes on if the caller is cancelled, and until it has
        ended the bytes are not released."""
        reading = self._reading = asyncio.ensure_future(in_thread(work, self.data))
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done():
                self._reading = None  # it would keep the result alive

    def release(self) -> None:
        """Frees the bytes, as soon as no thread reads them."""
        if self._reading:
            self._reading.add_done_callback(lambda _: self._release_later())
            return
        self.data = b""
        release, self._on_release = self._on_release, lambda: None
        release()

    def _release_later(self) -> None:
        self._reading = None
        self.release()

    def finish(self) -> None:
        """Marks the message as answered."""
        self.release()
        finish, self._on_finish = self._on_finish, lambda: None
        finish()


class StrictWebSockets(SlowClientGuard, WebSocketsSansIOProtocol):
    """Pauses reading while too many bytes wait. A large message takes its bytes from a budget that
    all connections share, and is not read while another message is being answered.
    """

    receive_seconds: ClassVar[float] = float(limits.RECEIVE_SECONDS)
    """How long one message may take to arrive, without the time in which reading is paused. The
    handshake has as long."""
    budget: ClassVar[SharedBudget] = SharedBudget(limits.FRAME_BYTES)
    admission: ClassVar[Admission]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = CLOSING_SECONDS
        self._message = bytearray()
        """The joined fragments so far: separate objects would take many times their size."""
        self._waiting_bytes = 0
        """Bytes of complete messages that are not taken from the budget."""
        self._small_frames = 0
        """Pings, pongs and small fragments since the last message."""
        self._unanswered = 0
        self._reserved = 0
        """Bytes taken from the budget for the message that is arriving."""
        self._reserving: asyncio.Future[None] | None = None
        self._arrival: asyncio.TimerHandle | None = None
        self._handshake: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._handshake = self.loop.call_later(self.receive_seconds, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), PARSED_BYTES):
            super().data_received(data[begin : begin + PARSED_BYTES])
            if self._small_frames > limits.SMALL_FRAMES and not self.close_sent:
                self._fail("too many small frames")
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._handshake_ended()
        self.admission.leave(self.transport)
        super().connection_lost(exc)
        if self._reserving:
            self._reserving.cancel()
        self._give_back(self._reserved)
        self._reserved = 0
        # frees the memory now instead of at the next garbage collection
        self.conn.reader.buffer = bytearray()
        self._message = bytearray()
        self._arrived()

    async def receive(self) -> ASGIReceiveEvent:
        return await self.queue.get()

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "websocket.close" and not await self._is_read():
            # a close frame would wait, and keep all unread bytes in memory
            self.transport.abort()
            return
        await super().send(message)
        # a refusal completes the handshake too; else uvicorn logs that there was no response
        self.handshake_complete = self.handshake_complete or self.close_sent
        if self.handshake_complete:
            self._handshake_ended()
        if message["type"] == "websocket.accept":
            self.handle_events()  # frames that arrived with the handshake
            self._look()

    def _handshake_ended(self) -> None:
        if self._handshake:
            self._handshake.cancel()
            self._handshake = None

    def handle_text(self, event: Frame) -> None:
        self.curr_msg_data_type = "text"
        self.handle_cont(event)

    def handle_bytes(self, event: Frame) -> None:
        self.curr_msg_data_type = "bytes"
        self.handle_cont(event)

    def handle_cont(self, event: Frame) -> None:
        data, event.data = event.data, b""  # the parser keeps the event until the next one
        self._small_frames += len(data) < SMALL_BYTES
        if not event.fin or self._message:
            self._message += data
        if event.fin:
            whole = bytes(self._message or data)
            self._message = bytearray()
            self._hand_on(whole)

    def handle_ping(self) -> None:
        """Sends no pong to a client that does not read: they would pile up."""
        self._small_frames += 1
        pong = self.conn.data_to_send()
        if self.writable.is_set():
            self.transport.write(b"".join(pong))

    def handle_pong(self, event: Frame) -> None:
        self._small_frames += 1
        super().handle_pong(event)

    def handle_parser_exception(self) -> None:
        """Sends the close frame and then only discards, until the client closes too or its time is
        up: a socket that is closed with unread bytes is reset, and the frame may be lost."""
        if self.close_sent:
            return
        assert self.conn.close_sent is not None
        code, reason = self.conn.close_sent.code, self.conn.close_sent.reason
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.transport.can_write_eof():  # TLS can't
            self.transport.write_eof()
        self._go_on()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    def keepalive_timeout(self) -> None:
        """Ignores a missing pong while reading is paused, since it could not have been read."""
        if self.read_paused:
            self.pong_timer = None
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def _hand_on(self, data: bytes) -> None:
        reserved, self._reserved = self._reserved, 0
        self._small_frames = 0
        self._arrived()
        if self.close_sent:
            self._give_back(reserved)
            return
        if self._unanswered > limits.SOCKET_FRAMES:
            self._give_back(reserved)
            self._fail("too many messages are waiting")
            return
        self._give_back(reserved - len(data) if reserved else 0)
        taken = len(data) if reserved else 0
        self._unanswered += 1
        self._waiting_bytes += len(data) - taken
        message = ReceivedMessage(
            data,
            is_text=self.curr_msg_data_type == "text",
            on_release=lambda: self._release(len(data), taken),
            on_finish=self._finish,
        )
        event: Any = {"type": "websocket.receive", "message": message}
        self.queue.put_nowait(event)

    def _release(self, size: int, taken: int) -> None:
        self._give_back(taken)
        self._waiting_bytes -= size - taken
        self._look()

    def _finish(self) -> None:
        self._unanswered -= 1
        self._look()

    def _give_back(self, size: int) -> None:
        if size:
            self.budget.give_back(size)

    def _look(self) -> None:
        """Pauses or resumes reading."""
        arriving = len(self.conn.reader.buffer) + len(self._message)
        if self.close_sent or self.disconnected or self.transport.is_closing():
            self._arrived()
            if arriving > limits.SOCKET_BYTES:  # the client sends on instead of closing
                self.transport.abort()
            return
        too_many = self._waiting_bytes + arriving > limits.SOCKET_BYTES
        if too_many and not self._reserved:
            self._pause()
            if arriving and self.handshake_complete and not self._unanswered:
                self._reserve()
        else:
            self._go_on()
        if arriving and not self.read_paused:
            self._await_arrival()
        else:
            self._arrived()

    def _reserve(self) -> None:
        if self._reserving is None:
            size = self.config.ws_max_size
            self._reserving = self.budget.reserve(size)
            self._reserving.add_done_callback(lambda reserving: self._reserved_now(reserving, size))

    def _reserved_now(self, reserving: asyncio.Future[None], size: int) -> None:
        self._reserving = None
        if reserving.cancelled():
            return
        if self.disconnected:
            self._give_back(size)
            return
        self._reserved = size
        self._look()

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()
            self.loop.call_later(PEER_SECONDS, self._check_peer)

    def _check_peer(self) -> None:
        """Polls the socket: a transport that does not read gets no event for a disconnect."""
        if not self.read_paused or self.transport.is_closing():
            return
        if has_hung_up(self.transport.get_extra_info("socket").fileno()):
            self.transport.abort()
        else:
            self.loop.call_later(PEER_SECONDS, self._check_peer)

    def _go_on(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _await_arrival(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(
                self.receive_seconds, self._fail, "a message took too long to arrive"
            )

    def _arrived(self) -> None:
        if self._arrival:
            self._arrival.cancel()
            self._arrival = None

    def _fail(self, why: str) -> None:
        if not self.handshake_complete:
            self.transport.close()
            return
        self.conn.fail(POLICY_VIOLATION, why)
        self.handle_parser_exception()

    async def _is_read(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.writable.wait()
        return self.writable.is_set()


def has_hung_up(descriptor: int) -> bool:
    peer = select.poll()
    peer.register(descriptor, HUNG_UP)
    return bool(peer.poll(0))


def web_sockets(
    receive_seconds: float, max_bytes: int, admission: Admission
) -> type[StrictWebSockets]:
    """`max_bytes` is the limit for one message."""
    budget = SharedBudget(max(limits.FRAME_BYTES, max_bytes))
    own = {"receive_seconds": receive_seconds, "budget": budget, "admission": admission}
    return type("StrictWebSockets", (StrictWebSockets,), own)
