"""The headers of a response are bounded, however many responses they are spread over."""

import asyncio
from collections.abc import Iterator

import httpx2
import pytest

from mlx_server import limits
from mlx_server.system.http_transport import BoundedTransport
from tests.hostile.upstreams import ANSWER, HostileServer, repeated

MOST = limits.UPSTREAM_HEADER_BYTES
HINT = b"HTTP/1.1 103 Early Hints\r\n\r\n"


def answer(*pieces: bytes) -> int:
    """The length of the answer's body, the second that the server sends."""

    async def ask(url: str) -> int:
        async with httpx2.AsyncClient(transport=BoundedTransport(trust_env=False)) as client:
            await client.post(url, content=b"first")
            return len((await client.post(url, content=b"second")).content)

    def stream() -> Iterator[bytes]:
        yield from pieces

    server = HostileServer(stream)
    try:
        return asyncio.run(asyncio.wait_for(ask(server.url), 20))
    finally:
        server.close()


@pytest.mark.parametrize(
    "pieces",
    [
        tuple(repeated(HINT, 10 * MOST)),
        (b"HTTP/1.1 200 OK\r\n", *repeated(b"a: b\r\n", 10 * MOST)),
        (b"HTTP/1.1 200 OK\r\na: ", b"x" * 10 * MOST),
    ],
    ids=["many responses", "many headers", "a long header"],
)
def test_endless_headers_are_refused(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(httpx2.RemoteProtocolError, match="too long"):
        answer(*pieces)


def test_a_response_is_read_after_others_and_may_be_long() -> None:
    _, _, body = ANSWER.partition(b"\r\n\r\n")
    assert answer(HINT * 9, ANSWER, b"\n" * MOST * 4) == len(body) + MOST * 4
