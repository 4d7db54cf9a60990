"""What clients may let wait on WebSockets, and how many of those they may open."""

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from mlx_server import limits
from tests.live.replayed import MODEL, replaying
from tests.live.server import UPGRADE, LiveServer, eventually
from tests.live.test_responses_socket import answer, connected, create, event

pytestmark = pytest.mark.alone

MEGABYTE = 1 << 20
LARGEST = 16 * MEGABYTE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = {"receive_seconds": 2, "max_body_bytes": LARGEST}
    with replaying(tmp_path_factory.mktemp("limits"), server=settings) as server:
        yield server
        assert "Traceback" not in server.log


EMPTY = b"\x81\x80\0\0\0\0"
"""A frame without text."""


def frame(data: bytes, opcode: int = 0x1, *, last: bool = True) -> bytes:
    head = bytes([(0x80 if last else 0) | opcode, 0xFF]) + len(data).to_bytes(8, "big")
    return head + bytes(4) + data


def asked(text: str, **more: Any) -> bytes:
    body = {"type": "response.create", "model": MODEL, "input": text, "store": False, **more}
    return json.dumps(body, ensure_ascii=False).encode()


def handshake(server: LiveServer) -> tuple[socket.socket, bytes]:
    line = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    line.sendall(UPGRADE)
    return line, line.recv(65536)


def test_a_client_that_leaves_behind_unread_frames_cancels(server: LiveServer) -> None:
    line, _ = handshake(server)
    line.sendall(frame(asked("slow")))
    line.settimeout(0.2)
    with pytest.raises(TimeoutError):
        line.sendall(frame(asked("slow", client_metadata="x" * (LARGEST - 1000))))
    eventually(lambda: not server.idle(), "it is answered")
    line.close()
    eventually(server.idle, "it is cancelled")


@pytest.mark.parametrize("part", [b"x", b"x" * (512 << 10)])
def test_a_message_that_never_ends_is_cut(server: LiveServer, part: bytes) -> None:
    line, _ = handshake(server)
    began = time.monotonic()
    line.sendall(frame(part, last=False))
    closed = b""
    line.settimeout(0.5)
    while time.monotonic() - began < 20:
        try:
            line.sendall(frame(b"", 0, last=False))  # and goes on by nothing
            if not (reported := line.recv(65536)):
                break
            closed += reported
        except TimeoutError:
            continue
        except OSError:
            break
    assert closed[:1] == b"\x88"
    assert b"too long to arrive" in closed
    assert time.monotonic() - began < 15
    line.close()


def test_a_message_in_many_fragments(server: LiveServer) -> None:
    data = asked("poem").ljust(limits.SMALL_FRAMES)
    small = [bytes([0, 0x81]) + bytes(4) + bytes([byte]) for byte in data]
    small[0] = b"\x01" + small[0][1:]
    small[-1] = b"\x80" + small[-1][1:]
    line, _ = handshake(server)
    with line:
        line.sendall(b"".join(small))
        reported = b""
        while b"response.completed" not in reported:
            reported += line.recv(65536)


@pytest.mark.parametrize(
    ("first", "following"),
    [
        (b"", b"\x89\x80" + bytes(4)),
        (b"", b"\x8a\x80" + bytes(4)),
        (b"\x01\x80" + bytes(4), b"\0\x80" + bytes(4)),
    ],
    ids=["pings", "pongs", "fragments"],
)
def test_frames_that_bring_no_message_close_it(
    server: LiveServer, first: bytes, following: bytes
) -> None:
    """A million of them would keep all streams waiting."""
    line, _ = handshake(server)
    with line:
        line.sendall(first + following * 4 * limits.SMALL_FRAMES)
        reported = line.makefile("rb").read()
    assert b"\x03\xf0too many small frames" in reported  # 1008
    assert reported.count(b"\x8a\0") < 2 * limits.SMALL_FRAMES


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (EMPTY * 1000, b"\x03\xf0too many messages are waiting"),
        (b"\x81\x01x", b"\x03\xeaincorrect masking"),
    ],
)
def test_a_client_that_sends_on_reads_why_it_was_closed(
    server: LiveServer, sent: bytes, why: bytes
) -> None:
    """With bytes that nobody has read, a socket that is closed is reset."""
    line, _ = handshake(server)
    with line:
        line.sendall(sent)
        for _ in range(16):
            line.sendall(EMPTY * 100_000)
        reported = line.makefile("rb").read()
    assert reported == bytes([0x88, len(why)]) + why


def test_text_that_is_none_closes_it(server: LiveServer) -> None:
    for size in (1, 300_000):
        with connected(server) as line:
            line.send(b"x" * size + b"\xff", text=True)
            with pytest.raises(ConnectionClosed) as closed:
                event(line)
        assert closed.value.rcvd
        assert closed.value.rcvd.code == 1007


def test_pipelined_requests_are_not_late(server: LiveServer) -> None:
    """For longer than one message may take to arrive, and never without a part of the next."""
    with connected(server) as line:
        began = time.monotonic()
        create(line, "steady")
        while time.monotonic() - began < 3:
            create(line, "steady")
            while event(line)["type"] != "response.completed":
                pass
        assert answer(line)["status"] == "completed"


def test_unpaid_pings_do_not_pile_up(server: LiveServer) -> None:
    """Of a client that reads no pongs."""
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    line, _ = handshake(server)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ping = b"\x89\xfd" + bytes(4) + b"x" * 125
    line.settimeout(5)
    try:
        for _ in range(300):
            line.sendall(ping * 1000)
    except OSError:
        pass
    assert process.memory_info().rss - before < 20 * MEGABYTE
    line.close()


DESCRIPTORS = 256


def test_idle_sockets_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        settings = {"api_keys": ["a", "b", "c"]}
        server = stack.enter_context(replaying(tmp_path, server=settings))
        server_limit = psutil.Process(server.process.pid)
        server_limit.rlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
        kept: list[bytes] = []
        refused: list[bytes] = []
        for n in range(237):
            head = UPGRADE.replace(b"\r\n\r\n", b"\r\nx-api-key: %c\r\n\r\n" % b"ab"[n % 2])
            line = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=20)
            )
            line.sendall(head)
            reported = line.recv(65536)
            (kept if reported.startswith(b"HTTP/1.1 101") else refused).append(reported)
        assert len(kept) == DESCRIPTORS // 4
        assert all(reported.startswith(b"HTTP/1.1 503") for reported in refused)
        assert b"too_many_websockets" in refused[-1]
        assert b"retry-after: 1" in refused[-1].lower()
        with server.openai(api_key="c") as client:
            assert client.responses.create(model=MODEL, input="poem").output_text
