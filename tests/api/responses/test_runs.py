"""What becomes of responses when the store, or a reader, makes trouble."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from mlx_server.api.responses import runs
from mlx_server.api.responses import web_socket as lines
from mlx_server.errors import StoreUnavailable
from mlx_server.http import sse
from mlx_server.http.admission import Admission
from mlx_server.http.resumable import EventLog
from mlx_server.http.web_sockets import web_sockets
from mlx_server.store import Store
from mlx_server.system.shared_budget import SharedBudget
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, error, ok
from tests.store.make import limit

PATH = "/v1/responses"
ASKED = {"model": wire.MODEL, "input": "a"}
PATIENCE = 20.0


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the store's calls that fail, for the test to fill."""
    names = set[str]()

    def failing(name: str) -> Any:
        call = getattr(Store, name)

        async def maybe(self: Store, *args: Any, **kwargs: Any) -> Any:
            if name in names:
                raise StoreUnavailable("The store is broken.")
            return await call(self, *args, **kwargs)

        return maybe

    for name in ("add", "put", "delete"):
        monkeypatch.setattr(Store, name, failing(name))
    monkeypatch.setattr(runs, "STORING_SECONDS", 0.05)
    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.01)
    return names


def test_nothing_is_generated_that_can_not_be_stored(tiny_path: Path, broken: set[str]) -> None:
    engine = ScriptedEngine()
    with wire.client(tiny_path, engine) as client:
        broken.add("add")
        for more in ({}, {"stream": True}, {"background": True}):
            response = client.post(PATH, json={**ASKED, **more})
            assert error(response, status=503)["code"] == "store_unavailable"
        assert engine.taken == []
        assert ok(client.post(PATH, json={**ASKED, "store": False}))["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_is_stored_when_that_is_possible_again(
    tiny_path: Path, broken: set[str], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.01)
    with wire.client(tiny_path, ScriptedEngine()) as client:
        broken.add("put")
        response = client.post(PATH, json={**ASKED, "stream": stream})
        reported = last(response.text) if stream else ok(response)
        assert (reported["status"], reported["store"]) == ("completed", False), (
            "no client gets a false report"
        )
        numbers = re.findall(r'"sequence_number":(\d+)', response.text)
        assert [*map(int, numbers)] == [*range(len(numbers))], "also while the last one waits"
        place = f"{PATH}/{reported['id']}"
        assert ok(client.get(place)) == {**reported, "store": True}, "from memory"
        app: Any = client.app
        assert app.state.runs.find(reported["id"], "")
        broken.clear()
        for _ in range(1000):
            if not app.state.runs.find(reported["id"], ""):
                break
            client.get("/health")
        assert not app.state.runs.find(reported["id"], "")
        assert ok(client.get(place)) == {**reported, "store": True}, "from the store"


def last(text: str) -> Json:
    *_, event, _done, _end = text.split("\n\n")
    found: Json = json.loads(event.partition("\ndata: ")[2])["response"]
    return found


def test_what_was_refused_is_forgotten(tiny_path: Path) -> None:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        error(client.post(PATH, json={**ASKED, "input": "a" * 100_000}))
        app: Any = client.app

        async def stored() -> int:
            found = await app.state.runs.store.stats()
            return int(found.responses)

        assert client.portal
        assert client.portal.call(stored) == 0


def test_a_log_is_read_while_it_grows() -> None:
    async def read() -> list[list[int]]:
        log = EventLog(SharedBudget(1 << 20))
        readers = [asyncio.create_task(numbers(log, start)) for start in (0, 2, 9)]
        for number in range(5):
            log.add(b"%d" % number)
            await asyncio.sleep(0)
        log.end()
        return [*await asyncio.gather(*readers), await numbers(log, 4)]

    assert asyncio.run(read()) == [[0, 1, 2, 3, 4], [2, 3, 4], [], [4]]


async def numbers(log: EventLog, start: int) -> list[int]:
    return [int(event) async for event in log.read(start)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[uvicorn.Server]:
    protocol = web_sockets(30, 16 << 20, Admission(9, 9))
    config = uvicorn.Config(
        app, port=0, ws=protocol, ws_per_message_deflate=False, log_config=None, **options
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        await serving


@pytest.mark.slow
def test_who_does_not_read_is_let_go(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "SLOW_SECONDS", 0.3)

    async def talk() -> None:
        async with listening(wire.app(tiny_path, ScriptedEngine())) as server:
            port = server.servers[0].sockets[0].getsockname()[1]
            with await asyncio.to_thread(deaf, port):
                await until(lambda: not server.server_state.connections)

    asyncio.run(talk())


HEAD = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def frame(asked: Json) -> bytes:
    """Masked with zeros."""
    text = json.dumps({"type": "response.create", "store": False, **asked}).encode()
    return b"\x81\xff" + len(text).to_bytes(8, "big") + bytes(4) + text


def deaf(port: int) -> socket.socket:
    """Asks for more than all the buffers on the way hold, and reads nothing of it."""
    line = socket.create_connection(("127.0.0.1", port))
    line.sendall(HEAD)
    assert line.recv(4096).startswith(b"HTTP/1.1 101")
    with suppress(ConnectionError):
        line.sendall(frame({**ASKED, "generate": False, "instructions": "x" * 8_000_000}))
    return line


def read_all(line: WebSocketTestSession) -> None:
    while True:
        line.receive_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SOCKET_IDLE_SECONDS", "SOCKET_SECONDS"])
def test_an_idle_or_old_socket_is_closed(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    limit(monkeypatch, name, 1)
    local = {"host": "localhost"}
    with (
        wire.client(tiny_path, ScriptedEngine()) as client,
        client.websocket_connect("ws://localhost/v1/responses", headers=local) as line,
        pytest.raises(WebSocketDisconnect) as closed,
    ):
        read_all(line)  # an old one has an event that says so
    assert closed.value.code == 1001


@pytest.mark.slow
def test_a_client_is_not_cut_for_pongs_that_can_not_be_read(tiny_path: Path) -> None:
    """While its next, large request waits for the answer to the one before."""
    engine = ScriptedEngine()
    engine.silent = True

    async def talk() -> None:
        pings = {"ws_ping_interval": 0.1, "ws_ping_timeout": 0.1}
        async with listening(wire.app(tiny_path, engine), **pings) as server:
            port = server.servers[0].sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(frame(ASKED) + frame({**ASKED, "client_metadata": "x" * 4_000_000}))
            await engine.took.wait()
            (protocol,) = server.server_state.connections
            await until(lambda: getattr(protocol, "read_paused", False))
            await asyncio.sleep(0.6)  # pings go by
            assert server.server_state.connections
            writer.transport.abort()
            await until(lambda: not server.server_state.connections)

    asyncio.run(talk())
