"""Whom a row belongs to: waiting rows take turns by client."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import HTTPConnection
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.http.security import authorise
from mlx_server.http.web_sockets import OpenSockets
from mlx_server.pool.pool import RowSlots
from tests.api import wire
from tests.api.wire import MODEL, ScriptedEngine
from tests.tables import cases

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": HI},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/generate": {"messages": HI},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 5},
    "/api/chat": {"model": MODEL, "messages": HI},
    "/api/generate": {"model": MODEL, "prompt": "hi"},
}

Send = Callable[[TestClient], None]
Check = Callable[[HTTPConnection], Awaitable[None]]


def over_http(path: str, **more: Any) -> Send:
    def send(client: TestClient) -> None:
        assert client.post(path, json={**BODIES[path], **more}).status_code == 200

    return send


def over_a_web_socket(client: TestClient) -> None:
    body = {"type": "response.create", "model": MODEL, "input": "hi"}
    with (
        suppress(*wire.CANCELLED),
        client.websocket_connect("ws://localhost/v1/responses") as socket,
    ):
        socket.send_json(body)
        while socket.receive_json()["type"] != "response.completed":
            pass


def in_the_background(client: TestClient) -> None:
    body = {**BODIES["/v1/responses"], "background": True}
    made = wire.ok(client.post("/v1/responses", json=body))
    while wire.ok(client.get(f"/v1/responses/{made['id']}"))["status"] != "completed":
        pass


WAYS: dict[str, Send] = {
    **{path: over_http(path) for path in BODIES},
    "truncated": over_http("/v1/responses", truncation="auto"),
    "web socket": over_a_web_socket,
    "background": in_the_background,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_endpoint_tells_the_engine_who_asks(tiny_path: Path, way: str) -> None:
    """By key, of which the engine gets a digest; by address where there are no keys."""
    by_key = hashlib.sha256(b"secret").hexdigest()
    for keys, expected in ((wire.key("secret"),), by_key), ((), "192.0.2.7"):
        engine = ScriptedEngine()
        app = wire.app(tiny_path, engine, api_keys=keys)
        headers = {"authorization": "Bearer secret"}
        with TestClient(app, "http://localhost", headers=headers, client=("192.0.2.7", 1)) as sent:
            WAYS[way](sent)
        assert [row.client for row in engine.taken] == [expected]


def test_sockets_and_loads_count_for_whoever_has_the_network(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine has 2**64 addresses of IPv6."""
    counted: list[str] = []
    for slots in (OpenSockets, RowSlots):
        name = "one_more" if slots is OpenSockets else "take"
        real = getattr(slots, name)

        def noted(self: Any, *arguments: Any, real: Any = real) -> Any:
            counted.append(arguments[-1])
            return real(self, *arguments)

        monkeypatch.setattr(slots, name, noted)
    app = wire.app(tiny_path, ScriptedEngine())
    with TestClient(app, "http://localhost", client=("2001:db8:1:2::9", 1)) as sent:
        over_a_web_socket(sent)
        assert sent.post("/api/generate", json={"model": MODEL}).status_code == 200
    assert counted == ["2001:db8:1:2::/64"] * 3


@cases
def test_an_address_stands_for_whoever_has_its_network(address: str | None, client: str) -> None:
    assert client_of(authorise([]), address) == client


def client_of(check: Check, address: str | None, user_agent: str = "", **headers: str) -> str:
    """The client that a request is taken to be."""
    sent = {"user-agent": user_agent, **headers}
    scope = {
        "type": "http",
        "client": (address, 5) if address else None,
        "headers": [(n.replace("_", "-").encode(), v.encode()) for n, v in sent.items()],
    }
    connection = HTTPConnection(scope)

    async def run() -> None:
        await check(connection)

    asyncio.run(run())
    client: str = connection.state.client
    return client


def test_programs_of_this_machine_are_clients_and_those_of_others_are_not() -> None:
    check = authorise([])
    agents = ["codex", "curl", "openai-python", "codex", "curl"]
    clients = [client_of(check, "127.0.0.1", agent) for agent in agents]
    assert len(set(clients)) == 3
    assert clients[:2] == clients[3:]
    named = [client_of(check, "::1", "curl", x_mlx_server_client=name) for name in "ab"]
    assert len({*clients, *named}) == 5
    assert {client_of(check, "192.0.2.7", agent) for agent in agents} == {"192.0.2.7"}
    keys = authorise(["secret"])
    with_key = [client_of(keys, "127.0.0.1", a, authorization="Bearer secret") for a in agents]
    assert len(set(with_key)) == 1


def test_a_program_that_takes_a_name_for_each_request_is_a_few_clients() -> None:
    check = authorise([])
    clients = Counter(client_of(check, "127.0.0.1", f"name {at}") for at in range(800))
    assert set(clients.values()) == {800 // limits.PROGRAMS}
