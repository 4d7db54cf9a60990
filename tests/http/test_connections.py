"""Connections that bring no HTTP, too much of it or nothing: they are refused or closed. Handshakes
of WebSockets have a deadline, and free their places."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast
from unittest.mock import Mock

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from mlx_server import limits
from mlx_server.http.admission import Admission
from mlx_server.http.connections import SMALL_BYTES, StrictConnection, StrictHttp, http
from mlx_server.http.web_sockets import StrictWebSockets, web_sockets


class Timer:
    def __init__(self, due: float, callback: Callable[..., object], given: tuple[Any, ...]) -> None:
        self.due = due
        self.callback = callback
        self.given = given
        self.is_pending = True

    def cancel(self) -> None:
        self.is_pending = False


class Loop:
    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[Timer] = []
        self._tasks: list[Coroutine[Any, Any, None]] = []

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, callback: Callable[..., object], *given: Any) -> Timer:
        self._timers.append(Timer(self._now + seconds, callback, given))
        return self._timers[-1]

    def create_task(self, task: Coroutine[Any, Any, None]) -> Mock:
        """The task runs when the test says so."""
        self._tasks.append(task)
        return Mock()

    def run_tasks(self) -> None:
        """Runs tasks that wait for nothing."""
        while self._tasks:
            try:
                self._tasks.pop(0).send(None)
            except StopIteration:
                continue
            raise AssertionError("the task waits")

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        for timer in [each for each in self._timers if each.is_pending and each.due <= self._now]:
            timer.is_pending = False
            timer.callback(*timer.given)

    def close(self) -> None:
        for task in self._tasks:
            task.close()


class Transport:
    def __init__(self, address: str = "10.0.0.1") -> None:
        self._address = address
        self._protocol: Any = None
        self.sent = b""
        self.is_closed = False
        self.is_aborted = False
        self.reads = True

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return (self._address, 5) if name == "peername" else None

    def set_write_buffer_limits(self, **limits: int) -> None: ...

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def refusal(self) -> tuple[int, str]:
        """The status and the message of the one answer, after which the connection was closed."""
        assert self.is_closed
        head, _, body = self.sent.partition(b"\r\n\r\n")
        assert b"\r\ncontent-type: application/json" in head
        assert b"\r\nconnection: close" in head
        return int(head.split()[1]), json.loads(body)["error"]["message"]


SECONDS = 30.0
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def app(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body"})


class Socket:
    """The protocol to which a handshake is passed."""

    received = b""

    def __init__(self, **options: Any) -> None: ...

    def connection_made(self, transport: Transport) -> None: ...

    def data_received(self, data: bytes) -> None:
        Socket.received = data


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def admission() -> Admission:
    return Admission(2, 2)


def connected(loop: Loop, admission: Admission) -> tuple[StrictHttp, Transport]:
    config = uvicorn.Config(app, ws=cast(Any, Socket), log_config=None, timeout_keep_alive=1000)
    made = http(SECONDS, admission)(config, ServerState(), {}, cast(Any, loop))
    transport = Transport()
    transport.set_protocol(made)
    made.connection_made(transport)
    return made, transport


def test_bytes_that_are_no_http_abort_an_answer_that_has_begun(
    loop: Loop, admission: Admission
) -> None:
    made, transport = connected(loop, admission)
    made.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    loop.run_tasks()
    answer = transport.sent
    made.data_received(b"no chunk\r\n")
    assert transport.is_aborted
    assert transport.sent == answer


@pytest.mark.parametrize("begun", [b"", REQUEST[:9], b"POST / HTTP/1.1\r\nHost: a\r\n"])
def test_a_request_must_arrive_in_time_however_its_bytes_are_spread(
    loop: Loop, admission: Admission, begun: bytes
) -> None:
    made, transport = connected(loop, admission)
    for at in range(len(begun)):
        made.data_received(begun[at : at + 1])
        loop.pass_time(0.1)
    loop.pass_time(SECONDS - 0.1 * len(begun) - 0.5)
    assert not transport.is_closed
    loop.pass_time(1)
    assert transport.is_closed


def test_the_body_counts_and_time_that_the_app_takes_does_not(
    loop: Loop, admission: Admission
) -> None:
    made, transport = connected(loop, admission)
    made.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na")
    loop.pass_time(SECONDS - 1)
    assert not transport.is_closed
    made.data_received(b"b")
    loop.pass_time(10 * SECONDS)
    assert not transport.is_closed
    loop.run_tasks()
    made.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na")
    loop.pass_time(SECONDS)
    assert transport.is_closed


@pytest.mark.parametrize("more", [0, 1])
def test_only_some_bytes_may_come_before_the_answer(
    loop: Loop, admission: Admission, more: int
) -> None:
    made, transport = connected(loop, admission)
    made.data_received(REQUEST)
    made.data_received(b"x" * (limits.PIPELINED_BYTES + more))
    assert transport.is_aborted == bool(more)
    assert transport.reads != bool(more), "else it would not see that the client leaves"


def test_a_websocket_has_no_deadline_of_http_and_keeps_its_place(
    loop: Loop, admission: Admission
) -> None:
    made, transport = connected(loop, admission)
    made.data_received(HANDSHAKE)
    assert isinstance(transport.get_protocol(), Socket)
    assert Socket.received.startswith(b"GET / HTTP/1.1\r\n")
    loop.pass_time(2 * SECONDS)
    assert not transport.is_closed
    assert len(admission) == 1


async def never_run(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("it is not run")


def opened(
    loop: Loop, admission: Admission, received: bytes = b""
) -> tuple[StrictWebSockets, Transport]:
    """A WebSocket after the head of its handshake, to which the never_run has not answered."""
    config = uvicorn.Config(never_run, log_config=None, ws_ping_interval=None)
    protocol: Any = web_sockets(SECONDS, 1 << 20, admission)
    made = protocol(config, ServerState(), {}, cast(Any, loop))
    transport = Transport()
    assert admission.enter(transport, "10.0.0.1")
    made.connection_made(transport)
    made.data_received(received)
    loop.close()
    return made, transport


@pytest.mark.parametrize("received", [b"", HANDSHAKE[:40], HANDSHAKE])
def test_a_handshake_that_never_completes_is_aborted(admission: Admission, received: bytes) -> None:
    loop = Loop()
    _, transport = opened(loop, admission, received)
    loop.pass_time(SECONDS - 1)
    assert not transport.is_aborted
    loop.pass_time(1)
    assert transport.is_aborted


def test_a_handshake_that_completes_has_no_deadline_any_more(admission: Admission) -> None:
    loop = Loop()
    made, transport = opened(loop, admission, HANDSHAKE)
    asyncio.run(made.send({"type": "websocket.accept"}))
    assert transport.sent.startswith(b"HTTP/1.1 101 ")
    loop.pass_time(2 * SECONDS)
    assert not transport.is_closed


def test_the_head_of_a_refusal_does_not_end_the_deadline(admission: Admission) -> None:
    loop = Loop()
    made, transport = opened(loop, admission, HANDSHAKE)
    start: Any = {"type": "websocket.http.response.start", "status": 400, "headers": []}
    asyncio.run(made.send(start))
    loop.pass_time(SECONDS)
    assert transport.is_aborted


class Line:
    def __init__(self, places: Admission) -> None:
        self._admission = places
        self.closed = False

    def close_for_another(self) -> None:
        assert not self.closed, "once"
        self.closed = True

    def leave(self) -> None:
        self._admission.is_busy(self)
        self._admission.leave(self)


@pytest.fixture
def places() -> Admission:
    return Admission(4, 3)


def entered(places: Admission, source: str) -> Line | None:
    line = Line(places)
    return line if places.enter(line, source) else None


def busy(places: Admission, source: str) -> Line:
    line = entered(places, source)
    assert line
    return line


def idle(places: Admission, source: str) -> Line:
    line = busy(places, source)
    places.is_idle(line, source)
    return line


def test_idle_ones_go_before_those_with_half_of_a_head(places: Admission) -> None:
    arriving, *others = [idle(places, source) for source in "abc"]
    places.is_arriving(arriving, "a")
    silent = [idle(places, source) for source in "d"] + others
    for source in "efg":
        assert busy(places, source)
    assert all(line.closed for line in silent)
    assert not arriving.closed
    assert busy(places, "h")
    assert arriving.closed


def test_requests_are_never_cut(places: Admission) -> None:
    lines = [busy(places, source) for source in "abcd"]
    assert entered(places, "e") is None
    assert not any(line.closed for line in lines)
    lines[0].leave()
    assert entered(places, "e")


def test_one_address_leaves_places_for_others(places: Admission) -> None:
    lines = [busy(places, "a") for _ in range(3)]
    other = idle(places, "b")
    assert entered(places, "a") is None
    assert not other.closed, "an address that has too many closes its own"
    lines[0].leave()
    assert entered(places, "a")


LINE = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def body_bytes(sent: bytes) -> int:
    connection = StrictConnection()
    connection.receive_data(HEAD + sent)
    received = 0
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        received += len(event.data) if isinstance(event, h11.Data) else 0
    return received


def chunk(size: int) -> bytes:
    return b"%x\r\n%b\r\n" % (size, b"x" * size)


def test_a_large_body_in_chunks_of_a_kilobyte_is_read() -> None:
    assert body_bytes(chunk(1024) * 8192 + b"0\r\n\r\n") == 8 << 20


@pytest.mark.parametrize("more", [0, 1])
def test_chunks_of_few_bytes_are_counted(more: int) -> None:
    sent = chunk(SMALL_BYTES - 1) * (limits.SMALL_CHUNKS + more) + b"0\r\n\r\n"
    if more:
        with pytest.raises(h11.RemoteProtocolError, match="256 bytes or more"):
            body_bytes(sent)
    else:
        assert body_bytes(sent) == limits.SMALL_CHUNKS * (SMALL_BYTES - 1)


READ_AT_ONCE = 256 << 10
"""As much as asyncio hands over in one piece."""


def requests(sent: bytes, piece: int = READ_AT_ONCE) -> int:
    """How many are read; raises what refuses one."""
    connection, count, given = StrictConnection(), 0, 0
    while given < len(sent):
        connection.receive_data(sent[given : given + piece])
        given += piece
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.EndOfMessage):
                count += 1
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
    return count


def long_head(size: int) -> bytes:
    return LINE + b"x: " + b"a" * (size - len(LINE) - 5) + b"\r\n\r\n"


def lines(count: int) -> bytes:
    """Of which the Host is one."""
    return LINE + b"a: b\r\n" * (count - 1)


@pytest.mark.parametrize("piece", [READ_AT_ONCE, 1000])
def test_a_long_head_is_refused_however_it_comes(piece: int) -> None:
    most = limits.HEAD_BYTES
    assert requests(long_head(most) + b"", piece) == 1
    for size in (most + 10, READ_AT_ONCE - 10):
        with pytest.raises(h11.RemoteProtocolError, match=r"head|too long"):
            requests(long_head(size), piece)


@pytest.mark.parametrize("ended", [True, False])
def test_lines_are_counted_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    most = limits.HEADERS
    assert requests(lines(most) + b"\r\n") == 1

    def parse(*given: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(h11.Connection, "_extract_next_receive_event", parse)
    sent = lines(most + 1) + (b"\r\n" if ended else b"")
    with pytest.raises(h11.RemoteProtocolError, match="header lines"):
        requests(sent)


def test_a_client_that_speaks_tls_is_recognised() -> None:
    with pytest.raises(h11.RemoteProtocolError, match="plain HTTP"):
        requests(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")


@pytest.mark.parametrize("body", [b"\n\n" * 5000, b"\r\n" * 20_000, b"x" * (100 << 10)])
def test_a_body_is_no_head(body: bytes) -> None:
    asked = LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert requests(asked + asked) == 2


def test_trailers_are_counted() -> None:
    most = limits.HEADERS
    assert requests(HEAD + b"0\r\n" + b"a: b\r\n" * most + b"\r\n") == 1
    with pytest.raises(h11.RemoteProtocolError, match="header lines"):
        requests(HEAD + b"0\r\n" + b"a: b\r\n" * (most + 1) + b"\r\n")


@pytest.mark.parametrize("extension", [1000, limits.HEAD_BYTES * 2])
def test_extensions_of_chunks_are_passed_over_or_refused(extension: int) -> None:
    """They reach no reader, and they are a part of what a chunk's head may have."""
    one = b"100;" + b"a" * extension + b"\r\n" + b"x" * 256 + b"\r\n"
    if extension < limits.HEAD_BYTES:
        assert body_bytes(one * 3 + b"0\r\n\r\n") == 3 * 256
    else:
        with pytest.raises(h11.RemoteProtocolError, match="too long"):
            requests(HEAD + one + b"0\r\n\r\n", 1000)


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
NEXT = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"\r\n",
        b"Content-Length: %d\r\n\r\n" % len(NEXT) + NEXT,
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    ],
    ids=["none", "that looks like a request", "of chunks"],
)
def test_an_offer_of_http2_changes_no_boundary(body: bytes) -> None:
    """With it and without, the same bytes are the same requests."""
    assert requests(LINE + OFFER + body + NEXT) == requests(LINE + body + NEXT) == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"Upgrade: websocket\r\nContent-Length: 5\r\n\r\nabcde",
        b"\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["two lengths", "lengths", "another protocol", "then HTTP/2"],
)
def test_an_offer_of_http2_excuses_nothing(sent: bytes) -> None:
    """The corpus has what two readers could cut differently without one."""
    with pytest.raises(h11.RemoteProtocolError):
        requests(LINE + OFFER + sent)
