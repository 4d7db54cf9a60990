"""One connection's trouble is its own: at the end of the server, in a handshake, with the clock."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mlx_server.config.settings import Settings, validated
from tests.hostile.inside import request, serving
from tests.live.server import UPGRADE, eventually

CHAT = "/v1/chat/completions"
MODEL = "said"
HOUR = 3600.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def settings(folder: Path, **more: Any) -> Settings:
    said = folder / "said.jsonl"
    said.write_text(json.dumps({"match": "regex:.", "output": "word " * 20, "delay_ms": 20}))
    model = {"source": f"replay:{said}", "family": "plain", "preload": True}
    server = {"port": 0, "drain_seconds": 20, **more}
    return validated(Settings, {"server": server, "models": {MODEL: model}})


def chat() -> bytes:
    messages = [{"role": "user", "content": "Hi"}]
    return request(CHAT, {"model": MODEL, "messages": messages, "stream": True})


def until(line: socket.socket, ending: bytes) -> bytes:
    received = b""
    while ending not in received:
        piece = line.recv(1 << 16)
        assert piece, received
        received += piece
    return received


def test_one_that_can_not_be_closed_in_order_cuts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shut: list[object] = []

    def broken(self: object) -> None:
        shut.append(self)
        raise RuntimeError

    with serving(settings(tmp_path)) as server:
        idle, web_socket, stream = server.connect(), server.connect(), server.connect()
        idle.sendall(HEALTH)
        until(idle, b'{"status":')
        web_socket.sendall(UPGRADE)
        until(web_socket, b"\r\n\r\n")
        stream.sendall(chat())
        until(stream, b'"w"')
        monkeypatch.setattr(H11Protocol, "shutdown", broken_unless_busy(H11Protocol, broken))
        monkeypatch.setattr(WebSocketsSansIOProtocol, "shutdown", broken)
        server.server.should_exit = True
        assert until(stream, b"[DONE]")
    assert len(shut) >= 1
    assert "a connection could not be closed cleanly" in caplog.text
    assert server.server.server_state.connections == set()


def broken_unless_busy(kind: type[H11Protocol], broken: Any) -> Any:
    shutdown = kind.shutdown

    def shut(self: H11Protocol) -> None:
        if self.cycle and not self.cycle.response_complete:
            shutdown(self)
        else:
            broken(self)

    return shut


@pytest.fixture(params=[-10 * 365 * 24 * HOUR, 10 * 365 * 24 * HOUR])
def jump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes the wall clock jump, from when the list has been filled."""
    clock, jumped = time.time, list[float]()
    monkeypatch.setattr(time, "time", lambda: clock() + sum(jumped))
    return jumped


def test_a_clock_that_jumps_ends_nothing(
    tmp_path: Path, jump: list[float], request: pytest.FixtureRequest
) -> None:
    with serving(settings(tmp_path)) as server:
        stream, half, web_socket = server.connect(), server.connect(), server.connect()
        stream.sendall(chat())
        until(stream, b'"w"')
        half.sendall(HEALTH[:9])
        web_socket.sendall(UPGRADE)
        until(web_socket, b"\r\n\r\n")
        jump.append(request.node.callspec.params["jump"])
        assert until(stream, b"[DONE]")
        half.sendall(HEALTH[9:])
        assert until(half, b'{"status":"ok"}')
        stream.sendall(chat())
        assert until(stream, b"[DONE]"), "and what is new is served"
        assert len(server.within(lambda: list(server.server.server_state.connections))) == 3
        eventually(server.is_free, "nothing is held")
