"""Bodies in chunks: how many of them there may be depends on how small they are."""

import h11
import pytest

from mlx_server import limits
from mlx_server.http.connections import SMALL_BYTES, StrictConnection

LINE = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def body_bytes(sent: bytes) -> int:
    connection = StrictConnection()
    connection.receive_data(HEAD + sent)
    received = 0
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        received += len(event.data) if isinstance(event, h11.Data) else 0
    return received


def chunk(size: int) -> bytes:
    return b"%x\r\n%b\r\n" % (size, b"x" * size)


def test_a_large_body_in_chunks_of_a_kilobyte_is_read() -> None:
    assert body_bytes(chunk(1024) * 8192 + b"0\r\n\r\n") == 8 << 20


@pytest.mark.parametrize("more", [0, 1])
def test_chunks_of_few_bytes_are_counted(more: int) -> None:
    sent = chunk(SMALL_BYTES - 1) * (limits.SMALL_CHUNKS + more) + b"0\r\n\r\n"
    if more:
        with pytest.raises(h11.RemoteProtocolError, match="256 bytes or more"):
            body_bytes(sent)
    else:
        assert body_bytes(sent) == limits.SMALL_CHUNKS * (SMALL_BYTES - 1)


READ_AT_ONCE = 256 << 10
"""As much as asyncio hands over in one piece."""


def requests(sent: bytes, piece: int = READ_AT_ONCE) -> int:
    """How many are read; raises what refuses one."""
    connection, count, given = StrictConnection(), 0, 0
    while given < len(sent):
        connection.receive_data(sent[given : given + piece])
        given += piece
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.EndOfMessage):
                count += 1
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
    return count


def long_head(size: int) -> bytes:
    return LINE + b"x: " + b"a" * (size - len(LINE) - 5) + b"\r\n\r\n"


def lines(count: int) -> bytes:
    """Of which the Host is one."""
    return LINE + b"a: b\r\n" * (count - 1)


@pytest.mark.parametrize("piece", [READ_AT_ONCE, 1000])
def test_a_long_head_is_refused_however_it_comes(piece: int) -> None:
    most = limits.HEAD_BYTES
    assert requests(long_head(most) + b"", piece) == 1
    for size in (most + 10, READ_AT_ONCE - 10):
        with pytest.raises(h11.RemoteProtocolError, match=r"head|too long"):
            requests(long_head(size), piece)


@pytest.mark.parametrize("ended", [True, False])
def test_lines_are_counted_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    most = limits.HEADERS
    assert requests(lines(most) + b"\r\n") == 1

    def parse(*given: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(h11.Connection, "_extract_next_receive_event", parse)
    sent = lines(most + 1) + (b"\r\n" if ended else b"")
    with pytest.raises(h11.RemoteProtocolError, match="header lines"):
        requests(sent)


def test_a_client_that_speaks_tls_is_recognised() -> None:
    with pytest.raises(h11.RemoteProtocolError, match="plain HTTP"):
        requests(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")


@pytest.mark.parametrize("body", [b"\n\n" * 5000, b"\r\n" * 20_000, b"x" * (100 << 10)])
def test_a_body_is_no_head(body: bytes) -> None:
    asked = LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert requests(asked + asked) == 2


def test_trailers_are_counted() -> None:
    most = limits.HEADERS
    assert requests(HEAD + b"0\r\n" + b"a: b\r\n" * most + b"\r\n") == 1
    with pytest.raises(h11.RemoteProtocolError, match="header lines"):
        requests(HEAD + b"0\r\n" + b"a: b\r\n" * (most + 1) + b"\r\n")


@pytest.mark.parametrize("extension", [1000, limits.HEAD_BYTES * 2])
def test_extensions_of_chunks_are_passed_over_or_refused(extension: int) -> None:
    """They reach no reader, and they are a part of what a chunk's head may have."""
    one = b"100;" + b"a" * extension + b"\r\n" + b"x" * 256 + b"\r\n"
    if extension < limits.HEAD_BYTES:
        assert body_bytes(one * 3 + b"0\r\n\r\n") == 3 * 256
    else:
        with pytest.raises(h11.RemoteProtocolError, match="too long"):
            requests(HEAD + one + b"0\r\n\r\n", 1000)


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
NEXT = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"\r\n",
        b"Content-Length: %d\r\n\r\n" % len(NEXT) + NEXT,
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    ],
    ids=["none", "that looks like a request", "of chunks"],
)
def test_an_offer_of_http2_changes_no_boundary(body: bytes) -> None:
    """With it and without, the same bytes are the same requests."""
    assert requests(LINE + OFFER + body + NEXT) == requests(LINE + body + NEXT) == 2


@pytest.mark.parametrize(
    "sent",
    [
        LINE + OFFER + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        LINE + OFFER + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        HEAD + b"0\r\nX: y\n\n" + NEXT,
        HEAD + b"0\r\n\n" + NEXT,
        HEAD + b"0\r\nX: y\r\n z\r\n\r\n" + NEXT,
        LINE + OFFER + b"Upgrade: websocket\r\nContent-Length: 5\r\n\r\nabcde",
        LINE + b"Upgrade: websocket\r\n" + OFFER + b"Content-Length: 5\r\n\r\nabcde",
        LINE + OFFER.replace(b"h2c", b"h2c, websocket") + b"Content-Length: 5\r\n\r\nabcde",
        LINE + OFFER.replace(b"HTTP2-Settings:", b"X:") + b"Content-Length: 5\r\n\r\nabcde",
        LINE + OFFER + b"\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
    ],
    ids=[
        "two lengths",
        "lengths",
        "LF",
        "trailing LF",
        "folded",
        "and",
        "or",
        "list",
        "no settings",
        "then HTTP/2",
        "PRI",
        "2.0",
    ],
)
def test_what_two_readers_could_cut_differently_is_refused(sent: bytes) -> None:
    with pytest.raises(h11.RemoteProtocolError):
        requests(sent)
