"""A WebSocket's handshake has a deadline, and its place is freed when it closes."""

import asyncio
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from mlx_server.http.admission import Admission
from mlx_server.http.web_sockets import StrictWebSockets, web_sockets
from tests.http.faked import Loop, Transport

SECONDS = 30.0
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("it is not run")


@pytest.fixture
def admission() -> Admission:
    return Admission(1, 1)


def opened(
    loop: Loop, admission: Admission, received: bytes = b""
) -> tuple[StrictWebSockets, Transport]:
    """A WebSocket after the head of its handshake, to which the app has not answered."""
    config = uvicorn.Config(app, log_config=None, ws_ping_interval=None)
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
