"""WebSockets of one client, and of all."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from mlx_server.api.responses.web_socket import UnstoredContext
from mlx_server.errors import Overloaded
from mlx_server.http.admission import Admission
from mlx_server.http.web_sockets import OpenSockets, StrictWebSockets, web_sockets
from mlx_server.store import ItemRecord
from mlx_server.system.shared_budget import SharedBudget
from tests.store.make import limit, runs

MESSAGE = 1 << 20
PIECE = 64 << 10
CLIENTS, MESSAGES = 8, 4
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
FRAME = b"\x81\xff" + MESSAGE.to_bytes(8, "big") + bytes(4) + b"x" * MESSAGE


def test_no_client_takes_all_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "SOCKETS", 5)
    limit(monkeypatch, "SOCKETS_PER_CLIENT", 3)
    sockets = OpenSockets()
    open_ = [sockets.one_more(client) for client in "aaabb"]
    for each in open_[:3]:
        each.__enter__()
    with (
        pytest.raises(Overloaded, match="You have 3 open WebSockets") as error,
        sockets.one_more("a"),
    ):
        pass
    assert error.value.code == "too_many_websockets"
    for each in open_[3:]:
        each.__enter__()
    with pytest.raises(Overloaded, match="All 5 WebSockets"), sockets.one_more("c"):
        pass
    for each in open_:
        each.__exit__(None, None, None)
    with sockets.one_more("a"):
        pass  # there are places again


async def answers_slowly(scope: Any, receive: Any, send: Any) -> None:
    """It reads its first message to no end."""
    await receive()
    await send({"type": "websocket.accept"})
    kept = await receive()
    await asyncio.Event().wait()
    del kept


async def connected(kind: type[StrictWebSockets], config: Config) -> StrictWebSockets:
    socket = kind(config, ServerState(), {})
    transport = Mock()
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None
    socket.connection_made(transport)
    socket.data_received(HANDSHAKE)
    await turns()
    assert socket.handshake_complete
    return socket


async def turns() -> None:
    """All that is under way has gone as far as it goes."""
    for _ in range(8):
        await asyncio.sleep(0)


async def read_of(sockets: list[StrictWebSockets], data: bytes) -> int:
    """Bytes that are taken in of clients that send in turn, each as long as it is read."""
    taken = dict.fromkeys(sockets, 0)
    for _ in range(0, len(data), PIECE):
        for socket in sockets:
            if not socket.read_paused:
                piece = data[taken[socket] : taken[socket] + PIECE]
                socket.data_received(piece)
                taken[socket] += len(piece)
        await turns()
    return sum(taken.values())


def test_large_messages_of_many_are_not_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fit into what all share. Of each other client no more is read than may always wait."""
    limit(monkeypatch, "FRAME_BYTES", 2 * MESSAGE)
    limit(monkeypatch, "SOCKET_BYTES", PIECE)

    async def attack() -> int:
        kind = web_sockets(30, MESSAGE, Admission(CLIENTS, CLIENTS))
        config = Config(answers_slowly, ws_max_size=MESSAGE, ws_ping_interval=None, log_config=None)
        config.load()
        sockets = [await connected(kind, config) for _ in range(CLIENTS)]
        try:
            return await read_of(sockets, FRAME * MESSAGES)
        finally:
            for socket in sockets:
                for task in socket.tasks:
                    task.cancel()
                socket.connection_lost(None)

    taken = asyncio.run(attack())
    assert 2 * MESSAGE < taken <= 2 * MESSAGE + CLIENTS * 3 * PIECE


@runs
async def test_first_come_first_served() -> None:
    budget = SharedBudget(10)
    first, second, third = (budget.reserve(size) for size in (6, 6, 2))
    await asyncio.sleep(0)
    assert [f.done() for f in (first, second, third)] == [True, False, False], "none is overtaken"
    assert not budget.take(1)
    budget.give_back(6)
    assert second.done()
    assert third.done()
    assert budget.used == 8
    assert budget.take(2)
    assert not budget.take(1)


@runs
async def test_who_leaves_the_line_is_passed_over() -> None:
    budget = SharedBudget(10)
    assert budget.take(10)
    first, second = budget.reserve(5), budget.reserve(5)
    first.cancel()
    budget.give_back(10)
    assert second.done()
    assert budget.used == 5


def said(size: int) -> list[ItemRecord]:
    return [ItemRecord("i", b"x" * size)]


def test_a_connection_remembers_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "SOCKET_MEMORY_BYTES", 100)
    budget = SharedBudget(150)
    memory, other = UnstoredContext(budget), UnstoredContext(budget)
    for n in range(3):
        memory.keep(f"{n}", said(40))
    assert list(memory.contexts) == ["1", "2"]
    memory.keep("large", said(101))
    assert list(memory.contexts) == ["1", "2"]
    memory.keep("2", said(60))
    assert list(memory.contexts) == ["1", "2"]
    assert budget.used == 100
    other.keep("a", said(60))
    assert not other.contexts, "there is no room for it in all"
    other.keep("b", said(50))
    assert budget.used == 150
    for each in (memory, other):
        each.clear()
    assert budget.used == 0
