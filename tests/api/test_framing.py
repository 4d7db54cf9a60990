"""Bodies in chunks: how many of them there may be depends on how small they are."""

import h11
import pytest

from mlx_server import limits
from mlx_server.api.framing import SMALL_BYTES, StrictConnection

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
    sent = chunk(SMALL_BYTES - 1) * (limits.SMALL_CHUNKS.value + more) + b"0\r\n\r\n"
    if more:
        with pytest.raises(h11.RemoteProtocolError, match="256 bytes or more"):
            body_bytes(sent)
    else:
        assert body_bytes(sent) == limits.SMALL_CHUNKS.value * (SMALL_BYTES - 1)
