"""A client that does not read is cut off; one that reads a little is waited for."""

import asyncio
from typing import Any, cast

import pytest

from mlx_server.http.connections import LEAST_BYTES, SlowClientGuard

pytestmark = pytest.mark.anyio

SECONDS = 0.02


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Transport:
    def __init__(self) -> None:
        self.unread = 0
        self.limits: dict[str, int] = {}
        self.aborted = asyncio.Event()
        self.looked = asyncio.Event()

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, **limits: int) -> None:
        self.limits = limits

    def get_write_buffer_size(self) -> int:
        self.looked.set()
        return self.unread

    def abort(self) -> None:
        self.aborted.set()


class Protocol(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport


class Guarded(SlowClientGuard, Protocol):
    send_seconds = SECONDS


def connected() -> tuple[Guarded, Transport]:
    protocol, transport = Guarded(), Transport()
    protocol.connection_made(cast(Any, transport))
    assert transport.limits == {"high": 0}
    return protocol, transport


async def test_a_client_that_reads_some_has_time_again() -> None:
    protocol, transport = connected()
    transport.unread = 3 * LEAST_BYTES
    protocol.pause_writing()
    transport.unread -= LEAST_BYTES
    transport.looked.clear()
    await asyncio.wait_for(transport.looked.wait(), 20)
    assert not transport.aborted.is_set()
    await asyncio.wait_for(transport.aborted.wait(), 20)


@pytest.mark.parametrize("end", ["read all", "left"])
async def test_who_has_read_or_left_is_not_looked_at_again(end: str) -> None:
    protocol, transport = connected()
    protocol.pause_writing()
    if end == "left":
        protocol.connection_lost(None)
    else:
        protocol.resume_writing()
    transport.looked.clear()
    await asyncio.sleep(3 * SECONDS)
    assert not transport.looked.is_set()
    assert not transport.aborted.is_set()
