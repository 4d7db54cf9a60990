"""Connections that bring no HTTP, too much of it or nothing: they are refused or closed. Handshakes
of WebSockets have a deadline, and free their places."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from mlx_server import limits
from mlx_server.http.admission import Admission
from mlx_server.http.connections import StrictHttp, http
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
