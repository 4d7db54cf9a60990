"""Reads the JSON values of an upstream's response, however its bytes come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import httpx2

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.json_bounds import ExceedsBounds
from mlx_server.system.turns import turn
from mlx_server.upstream.allowance import Allowance
from mlx_server.upstream.event_values import values_of
from mlx_server.upstream.sse import BYTE_ORDER_MARK, END, SseReader

END_SECONDS = 0.2
"""How long the reader waits for the end of the body after the last event."""

LARGE_JSON = 16 << 10
"""The characters of JSON above which it is parsed in a thread."""

BYTES_PER_TURN = 4 << 10
"""The most bytes that are read before other tasks of the event loop may get their turn."""


async def response_values(response: httpx2.Response, allowance: Allowance) -> AsyncGenerator[Any]:
    """Yields the JSON values of an event stream, or the one value of a JSON body."""
    texts = _texts(response, allowance)
    async for text in texts:
        if text == END:
            await _read_to_end(texts)
            yield END
            return
        for value in await json_values(text):
            await turn()
            yield value


async def json_values(text: str | bytes) -> Iterator[Any]:
    """The values of one event or body. It raises UpstreamFailed, also later, for a text that is not
    JSON, or has more values than a request may have."""
    found = _json_values(text)
    return iter(await asyncio.to_thread(list, found)) if len(text) > LARGE_JSON else found


def _json_values(text: str | bytes) -> Iterator[Any]:
    try:
        yield from values_of(text)
    except ExceedsBounds as error:
        raise UpstreamFailed(f"The upstream sent JSON that is too large: {error}.") from None
    except (ValueError, RecursionError):
        raise UpstreamFailed("The upstream sent no valid JSON.") from None


async def limited(response: httpx2.Response, most: int) -> bytes:
    """The first `most` bytes of a body; the rest is not read."""
    body = bytearray()
    async for chunk in _chunks(response):
        body += chunk
        if len(body) >= most:
            break
    return bytes(body[:most])


async def _texts(response: httpx2.Response, allowance: Allowance) -> AsyncGenerator[str | bytes]:
    """Yields the data of the events of a stream, or a JSON body. Its first bytes show which of them
    it is, since the content type of some servers is wrong."""
    body, reader = bytearray(), None
    async for chunk in _chunks(response):
        allowance.charge(len(chunk))
        if reader is None:
            body += chunk
            if _may_be_json(body):
                if len(body) > limits.UPSTREAM_LINE_BYTES:
                    raise UpstreamFailed("The upstream sent a body that is too long.")
                continue
            reader, chunk = SseReader(), bytes(body)
        for text in reader.feed(chunk):
            yield text
    if reader is None:
        if body.strip():
            yield bytes(body.removeprefix(BYTE_ORDER_MARK))
        return
    for text in reader.finish():
        yield text


async def _chunks(response: httpx2.Response) -> AsyncGenerator[bytes]:
    async for chunk in response.aiter_raw():
        for begin in range(0, len(chunk), BYTES_PER_TURN):
            await turn()
            yield chunk[begin : begin + BYTES_PER_TURN]


async def _read_to_end(texts: AsyncIterator[Any]) -> None:
    """Reads the body to its end after the last event, so that the connection can be used again.
    Some servers take a connection that is closed earlier for a client that was lost."""
    with suppress(TimeoutError, httpx2.HTTPError, UpstreamFailed):
        async with asyncio.timeout(END_SECONDS):
            async for _ in texts:
                pass


def _may_be_json(begin: bytearray) -> bool:
    """Whether a body with this beginning may be JSON, and not an event stream."""
    head = bytes(begin[:64]).removeprefix(BYTE_ORDER_MARK).lstrip()
    return not head or head.startswith((b"{", b"["))
