"""Connections that want nothing good: too many, half of a request, an Upgrade that is none; and one
that can't be closed in order, or is open while the clock is set."""

import json
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mlx_server import limits
from mlx_server.config.settings import Settings, validated
from mlx_server.system import descriptors
from tests.hostile.corpus import posted
from tests.hostile.inside import Inside, request, reset
from tests.hostile.inside import serving as inside_serving
from tests.live import server as live
from tests.live.server import TINY, LiveServer, eventually, serving

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "slow", "messages": [{"role": "user", "content": "Hi"}]}
DESCRIPTORS = 256
MOST = descriptors.connections(DESCRIPTORS)
MOST_OF_ONE = descriptors.connections_per_address(MOST)
WORDS = 25
RECEIVE_SECONDS = 2.0

KEY = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
OFFER = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
SOCKET = (*OFFER, KEY)


@contextmanager
def few_descriptors(folder: Path) -> Iterator[None]:
    """For servers that are started within: soft and hard."""
    folder.mkdir(parents=True, exist_ok=True)
    limited = folder / "python"
    limited.write_text(f'#!/bin/sh\nulimit -n {DESCRIPTORS}\nexec {sys.executable} "$@"\n')
    limited.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(live, "sys", SimpleNamespace(executable=str(limited)))
        yield


def config(folder: Path, **more: Any) -> dict[str, Any]:
    said = [{"match": "regex:.", "output": "word " * WORDS, "delay_ms": 20}]
    (folder / "said.jsonl").write_text("\n".join(map(json.dumps, said)))
    model = {"source": f"replay:{folder}/said.jsonl", "family": "plain", "preload": True}
    server = {"receive_seconds": RECEIVE_SECONDS, "drain_seconds": 20, **more}
    return {"server": server, "models": {"slow": model}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("connections")
    with ExitStack() as stack:
        with few_descriptors(folder):
            server = stack.enter_context(serving(folder, config(folder)))
        eventually(server.is_healthy, "its model is loaded")
        yield server
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as clients:
        yield clients


def head(*lines: str, method: str = "GET", path: str = "/v1/responses") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


def line(clients: ExitStack, server: LiveServer, sent: bytes, at: str = "") -> socket.socket:
    """A connection from an address of loopback, if one is given."""
    source = (at, 0) if at else None
    address = ("127.0.0.1", server.port)
    found = clients.enter_context(socket.create_connection(address, 120, source_address=source))
    found.sendall(sent)
    return found


def rest(found: socket.socket) -> bytes:
    received = b""
    try:
        while piece := found.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass
    return received


def status(found: socket.socket) -> int:
    """Of the last answer, once the server has closed; 0 without one."""
    *_, last = rest(found).split(b"HTTP/1.1 ")
    return int(last[:3] or 0)


def streamed(server: LiveServer) -> str:
    with server.http() as http:
        return http.post(CHAT, json={**BODY, "stream": True}).text


HOST = "Host: localhost"
HEALTH = head(HOST, path="/health")
FIVE = "Content-Length: 5"
UPGRADES = {
    "a body": head(HOST, *SOCKET, FIVE) + b"abcde",
    "a body that does not come": head(HOST, *SOCKET, FIVE),
    "a body of chunks": head(HOST, *SOCKET, "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "chunks that do not come": head(HOST, *SOCKET, "Transfer-Encoding: chunked"),
    "a body without a length": head(HOST, *SOCKET) + b"abcde",
    "another one behind it": head(HOST, *SOCKET) * 2,
    "a foreign Host": head("Host: evil.example", *SOCKET, FIVE),
    "no Host": head(*SOCKET, FIVE),
    "no key": head(HOST, *OFFER),
    "no key, a body": head(HOST, *OFFER, FIVE),
    "a wrong key": head(HOST, *OFFER, "Sec-WebSocket-Key: x"),
    "two keys": head(HOST, *SOCKET, KEY),
    "no version": head(HOST, "Connection: Upgrade", "Upgrade: websocket", KEY),
    "another method": head(HOST, *SOCKET, method="POST"),
    "a long line": head(HOST, *SOCKET, f"X: {'x' * 9000}"),
    "a long path": head(HOST, *SOCKET, path=f"/{'x' * 9000}"),
    "many lines": head(HOST, *SOCKET, *["X: y"] * 200),
    "odd characters": head(HOST, *SOCKET, "X: a\x01b"),
    "a length of two zeros": head(HOST, *SOCKET, "Content-Length: 00"),
    "two words": head(HOST, "Connection: keep-alive, Upgrade", *SOCKET[1:], FIVE),
    "two lines": head(HOST, "Connection: Upgrade", "Connection: close", *SOCKET[1:], FIVE),
    "capitals": head(HOST, "Connection: UPGRADE", "Upgrade: WebSocket", *SOCKET[2:], FIVE),
    "HTTP/2": head(HOST, "Connection: Upgrade", "Upgrade: h2c", FIVE) + b"abcde",
    "something else": head(HOST, "Connection: Upgrade", "Upgrade: foo/2", FIVE) + b"abcde",
    "two protocols": head(HOST, "Connection: Upgrade", "Upgrade: h2c, websocket", FIVE),
    "behind another request": HEALTH + head(HOST, *SOCKET, FIVE),
}


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_upgrade_that_is_none_is_refused(
    server: LiveServer, clients: ExitStack, upgrade: str
) -> None:
    began = time.monotonic()
    assert status(line(clients, server, UPGRADES[upgrade])) == 400
    assert time.monotonic() - began < RECEIVE_SECONDS, "at once"


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEALTH])
def test_those_that_wait_give_way(server: LiveServer, clients: ExitStack, sent: bytes) -> None:
    """Connections without a request, with half of one, and idle ones."""
    lines = [line(clients, server, sent) for _ in range(DESCRIPTORS + 4)]
    assert server.is_healthy()
    assert psutil.Process(server.process.pid).num_fds() < DESCRIPTORS
    rest(lines[0])  # which ends, by itself


BEGUN = head(HOST, "Content-Type: application/json", "Content-Length: 9", method="POST", path=CHAT)


def test_the_surplus_is_refused(server: LiveServer, clients: ExitStack) -> None:
    lines = [line(clients, server, BEGUN, "127.0.0.2") for _ in range(DESCRIPTORS)]
    kept = lines[:MOST_OF_ONE]
    refused = Counter(status(found) for found in lines[MOST_OF_ONE:])
    assert refused == {503: DESCRIPTORS - MOST_OF_ONE}
    assert server.is_healthy(), "another address is served"
    more = [line(clients, server, BEGUN, "127.0.0.3") for _ in range(MOST)]
    assert status(more[-1]) == 503
    assert psutil.Process(server.process.pid).num_fds() < DESCRIPTORS
    for found in kept:
        assert status(found) == 0, "they are cut when their time is over"
    assert server.is_healthy()


def test_resets_give_their_places_back(server: LiveServer, clients: ExitStack) -> None:
    """At any point: before, within and after a head, a body, a handshake, a half-closed line."""
    points = [b"", b"GET /he", BEGUN, BEGUN + b"{", head(HOST, *SOCKET), HEALTH]
    for number in range(2 * MOST):
        found = line(clients, server, points[number % len(points)])
        if number % 3 == 0:
            found.shutdown(socket.SHUT_WR)
        reset(found)
    time.sleep(0)
    process = psutil.Process(server.process.pid)
    eventually(lambda: len(process.net_connections("tcp")) <= 2, "all are gone")
    lines = [line(clients, server, BEGUN) for _ in range(MOST_OF_ONE - 1)]
    assert server.is_healthy(), "none of them is counted any more"
    assert len(lines) == MOST_OF_ONE - 1


WAITING = 300
"""Requests of four rows: more than are answered and wait, and fewer than one address may have."""


def test_each_waiting_request_is_answered_or_refused_as_one_too_many(
    tmp_path: Path, tiny_path: Path, clients: ExitStack
) -> None:
    config = {"models": {TINY: {"source": str(tiny_path)}}}
    body = {**BODY, "model": TINY, "n": 4, "temperature": 0, "max_tokens": 2}
    with serving(tmp_path, config) as server:
        lines = [line(clients, server, b"") for _ in range(WAITING)]
        for each in lines:
            each.sendall(posted(body, "Connection: close"))
        answers = [rest(each) for each in lines]
        eventually(server.idle, "no row is left")
    outcomes = set()
    for answer in answers:
        start, _, content = answer.partition(b"\r\n\r\n")
        found = json.loads(content)
        texts = {choice["message"]["content"] for choice in found.get("choices", ())}
        outcomes.add((start.split()[1], *(texts or [found["error"]["code"]])))
    refused = (b"503", "overloaded")
    assert refused in outcomes
    assert [status for status, _ in outcomes - {refused}] == [b"200"], "all with the same text"


def test_none_of_them_keeps_a_server_from_its_end(tmp_path: Path, clients: ExitStack) -> None:
    with few_descriptors(tmp_path), serving(tmp_path, config(tmp_path)) as server:
        with ThreadPoolExecutor(1) as thread:
            stream = thread.submit(streamed, server)
            eventually(lambda: server.gauge("mlx_server_batch_size") == 1, "it is answered")
            for sent in [*UPGRADES.values(), b"", b"GET /he", BEGUN, head(HOST, *SOCKET)]:
                line(clients, server, sent)
            server.process.send_signal(signal.SIGTERM)
            assert stream.result().endswith("data: [DONE]\n\n")
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.log


def test_few_descriptors_are_told_of(server: LiveServer) -> None:
    assert f"only {DESCRIPTORS} files and sockets can be open at once" in server.log
    assert "ulimit -Hn 4096" in server.log
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200


FORM = "Content-Type: multipart/form-data; boundary=b"
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
LAST = b"\r\n--b--"


def upload(size: int, *more: str) -> tuple[bytes, bytes]:
    """The head and the body of a request with a file of that size."""
    body = PURPOSE + FILE + bytes(size) + LAST
    lines = ("Host: localhost", "Connection: close", FORM, f"Content-Length: {len(body)}", *more)
    return head(*lines, method="POST", path="/v1/files"), body


def test_an_upload_may_last_while_it_goes_on(server: LiveServer, clients: ExitStack) -> None:
    enough = limits.UPLOAD_BYTES
    sent = b"".join(upload(2 * enough))
    lively = line(clients, server, sent[:enough])
    sluggish = line(clients, server, sent[: enough - 1])
    assert rest(sluggish) == b"", "it is closed once it has had the time of a request"
    lively.sendall(sent[enough:])
    assert status(lively) == 200


def test_a_client_uploads_few_files_at_once(server: LiveServer, clients: ExitStack) -> None:
    start, body = upload(10, "Expect: 100-continue")
    going = [line(clients, server, start) for _ in range(limits.UPLOADS)]
    for each in going:
        assert each.recv(1 << 10).startswith(b"HTTP/1.1 100")
    assert status(line(clients, server, b"".join(upload(10)))) == 503
    for each in going:
        each.sendall(body)
        assert status(each) == 200
    assert status(line(clients, server, b"".join(upload(10)))) == 200


def inside(folder: Path) -> AbstractContextManager[Inside]:
    return inside_serving(validated(Settings, config(folder, port=0, receive_seconds=60.0)))


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

    with inside(tmp_path) as server:
        idle, web_socket, stream = server.connect(), server.connect(), server.connect()
        idle.sendall(HEALTH)
        until(idle, b'{"status":')
        web_socket.sendall(head(HOST, *SOCKET))
        until(web_socket, b"\r\n\r\n")
        stream.sendall(request(CHAT, {**BODY, "stream": True}))
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


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_jumps_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    clock = time.time
    with inside(tmp_path) as server:
        stream, half, web_socket = server.connect(), server.connect(), server.connect()
        stream.sendall(request(CHAT, {**BODY, "stream": True}))
        until(stream, b'"w"')
        half.sendall(HEALTH[:9])
        web_socket.sendall(head(HOST, *SOCKET))
        until(web_socket, b"\r\n\r\n")
        monkeypatch.setattr(time, "time", lambda: clock() + years * 365 * 24 * 3600.0)
        assert until(stream, b"[DONE]")
        half.sendall(HEALTH[9:])
        assert until(half, b'{"status":"ok"}')
        stream.sendall(request(CHAT, {**BODY, "stream": True}))
        assert until(stream, b"[DONE]"), "and what is new is served"
        assert len(server.within(lambda: list(server.server.server_state.connections))) == 3
        eventually(server.is_free, "nothing is held")
