"""Connections that bring no HTTP, too much of it or nothing: they are refused or closed."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from mlx_server import limits
from mlx_server.http.admission import Admission
from mlx_server.http.connections import StrictHttp, http
from tests.http.faked import Loop, Transport

SECONDS = 30.0
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\n"
)
KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


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
    made.data_received(UPGRADE + KEY + b"\r\n")
    assert isinstance(transport.get_protocol(), Socket)
    assert Socket.received.startswith(b"GET / HTTP/1.1\r\n")
    loop.pass_time(2 * SECONDS)
    assert not transport.is_closed
    assert len(admission) == 1
