"""Reads the JSON values of an upstream's response, within what one answer may take."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import httpx2
import msgspec

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.json_bounds import ExceedsBounds, check_bounds, check_numbers
from mlx_server.system.turns import turn

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

END = "[DONE]"

BREAK = re.compile(rb"\r\n?|\n")

MEMORY_PER_BYTE = 4
"""The bytes of memory that are reckoned for each byte that an upstream sends. What is kept of an
event takes one to four times the event's size."""


class Allowance:
    """The memory and the time of one answer, across every request that is made for it."""

    _charged_in_all: ClassVar[int] = 0
    _running: ClassVar[int] = 0

    def __init__(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds
        self._charged = 0

    @property
    def seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def charge(self, size: int) -> None:
        """Charges received bytes. Raises UpstreamFailed if this answer has too many. If all answers
        together do, that is raised for those with more than their equal share."""
        if size and not self._charged:
            Allowance._running += 1
        self._charged += size * MEMORY_PER_BYTE
        Allowance._charged_in_all += size * MEMORY_PER_BYTE
        if self._charged > limits.UPSTREAM_MEMORY:
            raise UpstreamFailed("The upstream sent too many bytes.")
        most = limits.UPSTREAM_ALL_MEMORY
        if Allowance._charged_in_all > most < self._charged * Allowance._running:
            raise UpstreamFailed(
                "The answers that run take too much memory together, and this one more than its "
                "share. Try again later."
            )

    def release(self) -> None:
        """Ends the answer, so that others may use its memory."""
        if self._charged:
            Allowance._charged_in_all -= self._charged
            Allowance._running -= 1
            self._charged = 0


class SseReader:
    """Turns chunks of bytes, however they are cut, into the `data` of events."""

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """The parts of a line whose end has not come yet."""
        self._data: list[str] = []
        self._size = 0
        """The bytes of `_line` and of the lines of `_data`."""
        self._after_return = False
        self._is_first = True
        """Whether the next line is the first one, which may have a byte order mark."""

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that this chunk completes."""
        if self._after_return and chunk:  # the line feed belongs to the line break before it
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        self._after_return = chunk.endswith(b"\r")
        first, *others = BREAK.split(chunk)
        self._extend(first)
        events: list[str] = []
        for other in others:
            self._end_line(events)
            self._extend(other)
        return events

    def finish(self) -> list[str]:
        """The data of the last event, if the stream ended without the empty line after it."""
        events: list[str] = []
        self._end_line(events)
        self._end_line(events)
        return events

    def _extend(self, part: bytes) -> None:
        if part:
            self._line.append(part)
            self._size += len(part)
            if self._size > limits.UPSTREAM_LINE_BYTES:
                raise UpstreamFailed("The upstream sent an event that is too long.")

    def _end_line(self, events: list[str]) -> None:
        line = b"".join(self._line)
        self._line.clear()
        if self._is_first:
            line, self._is_first = line.removeprefix(BYTE_ORDER_MARK), False
        if not line:
            events += self._events()
            return
        name, _, value = line.partition(b":")
        if name != b"data":  # a comment, or a field without meaning here
            self._size -= len(line)
            return
        try:
            text = value.removeprefix(b" ").decode()
        except UnicodeDecodeError:
            raise UpstreamFailed("The upstream sent text that is not UTF-8.") from None
        if text.strip():
            self._data.append(END if text.strip() == END else text)

    def _events(self) -> list[str]:
        """The data of the event that an empty line ends; none if it has no data."""
        lines, self._data, self._size = self._data, [], 0
        return ["\n".join(lines)] if lines else []


END_SECONDS = 0.2
"""How long the reader waits for the end of the body after the last event."""

LARGE_JSON = 16 << 10
"""The characters of JSON above which it is parsed in a thread."""

BYTES_PER_TURN = 4 << 10
"""The most bytes that are read before other tasks of the event loop may get their turn."""


async def response_values(response: httpx2.Response, allowance: Allowance) -> AsyncGenerator[Any]:
    """Yields the JSON values of an event stream, or the one value of a JSON body."""
    reader, chunks = ResponseReader(), response.aiter_raw()
    chunk: bytes | None = b""
    while chunk is not None:
        chunk = await anext(chunks, None)
        allowance.charge(len(chunk or b""))
        for begin in range(0, len(chunk or b"") or 1, BYTES_PER_TURN):
            await turn()
            part = None if chunk is None else chunk[begin : begin + BYTES_PER_TURN]
            texts = reader.finish() if part is None else reader.feed(part)
            for text in texts:
                if text == END:
                    await _read_to_end(chunks, allowance)
                    yield END
                    return
                for value in await json_values(text):
                    await turn()
                    yield value


async def json_values(text: str | bytes) -> Iterator[Any]:
    """The values of one event or body. It raises UpstreamFailed, also later, for a text that is not
    JSON, or has more values than a request may have."""
    values = _json_values(text)
    return iter(await asyncio.to_thread(list, values)) if len(text) > LARGE_JSON else values


def _json_values(text: str | bytes) -> Iterator[Any]:
    """The value of a text, or the values of a list, in which Gemini wraps an error."""
    try:
        raw = text.encode() if isinstance(text, str) else text
        check_bounds(raw)
        check_numbers(raw)
        value = msgspec.json.decode(raw)
        if isinstance(value, list):
            yield from filter(None, value)
        elif value is not None:
            yield value
    except ExceedsBounds as error:
        raise UpstreamFailed(f"The upstream sent JSON that is too large: {error}.") from None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UpstreamFailed("The upstream sent no valid JSON.") from None


async def limited(response: httpx2.Response, most: int) -> bytes:
    """The first `most` bytes of a body; the rest is not read."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        await turn()
        body += chunk[:most]
        if len(body) >= most:
            break
    return bytes(body[:most])


class ResponseReader:
    """Turns chunks of bytes into the data of a stream's events, or into a JSON body.

    The first bytes show which it is, since the content type of some servers is wrong.
    """

    def __init__(self) -> None:
        self._body = bytearray()
        self._events: SseReader | None = None

    def feed(self, chunk: bytes) -> Sequence[str | bytes]:
        if self._events:
            return self._events.feed(chunk)
        self._body += chunk
        if not _may_be_json(self._body):
            self._events = SseReader()
            return self._events.feed(bytes(self._body))
        if len(self._body) > limits.UPSTREAM_LINE_BYTES:
            raise UpstreamFailed("The upstream sent a body that is too long.")
        return []

    def finish(self) -> Sequence[str | bytes]:
        if self._events:
            return self._events.finish()
        return [bytes(self._body.removeprefix(BYTE_ORDER_MARK))] if self._body.strip() else []


async def _read_to_end(chunks: AsyncIterator[bytes], allowance: Allowance) -> None:
    """Reads the body to its end after the last event, so that the connection can be used again.
    Some servers take a connection that is closed earlier for a client that was lost."""
    with suppress(TimeoutError, httpx2.HTTPError, UpstreamFailed):
        async with asyncio.timeout(END_SECONDS):
            async for chunk in chunks:
                allowance.charge(len(chunk))


def _may_be_json(begin: bytearray) -> bool:
    """Whether a body with this beginning may be JSON, and not an event stream."""
    head = bytes(begin[:64]).removeprefix(BYTE_ORDER_MARK).lstrip()
    return not head or head.startswith((b"{", b"["))
