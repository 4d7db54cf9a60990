"""Reads the JSON values of an upstream's response, within what one answer may take."""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import httpx2
import msgspec

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.json_bounds import ExceedsBounds, check_bounds, check_numbers
from mlx_server.system.turns import turn


def decoded(text: str | bytes) -> Any:
    """The value of a text, parsed as strict JSON if possible, which is faster. Raises as
    `lenient_json` does."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return lenient_json(text if isinstance(text, str) else text.decode())


def lenient_json(text: str) -> Any:
    """The value, with None in place of NaN and infinite numbers.

    Raises ValueError or RecursionError for a text that is not JSON.
    """
    found = json.loads(text, parse_constant=lambda name: None, parse_float=_finite)
    return _encodable(found)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _encodable(value: Any) -> Any:
    """The value, without lone surrogates, which some servers make by cutting an emoji in two."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_encodable(each) for each in value]
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case _:
            return value


BYTE_ORDER_MARK = b"\xef\xbb\xbf"

END = "[DONE]"

ENDS = (END, "[done]", "DONE", f'"{END}"')
"""The spellings of the event that ends a stream."""

JSON_STARTS = (b"{", b"}", b"[", b"]", b'"', b",", b" ", b"\t")
"""The beginnings of lines that are taken for JSON that an upstream sent without `data:`."""

BREAK = re.compile(rb"\r\n?|\n")

DATA = re.compile(rb"(?: ?data:)*+ ?")
"""Matches what precedes a value. Some proxies repeat the name of the field."""


MEMORY_PER_BYTE = 4
"""The bytes of memory that are reckoned for each byte that an upstream sends. What is kept of an
event takes one to four times the event's size."""


class Allowance:
    """The memory and the time of one answer, across every request that is made for it."""

    _charged_in_all: ClassVar[int] = 0
    _running: ClassVar[int] = 0

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + seconds
        self._charged = 0

    @property
    def seconds_left(self) -> float:
        return self._ends_at - self._clock()

    def charge(self, size: int) -> None:
        """Charges received bytes. Raises UpstreamFailed if this answer has too many. If all answers
        together do, that is raised for those with more than their equal share."""
        if not self._charged:
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
        self._are_values = True
        """Whether each line of `_data` is an event of its own, because it is a JSON object or the
        end of the stream."""
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
        found: list[str] = []
        for other in others:
            self._end_line(found)
            self._extend(other)
        return found

    def finish(self) -> list[str]:
        """The data of the last event, if the stream ended without the empty line after it."""
        found: list[str] = []
        self._end_line(found)
        self._end_line(found)
        return found

    def _extend(self, part: bytes) -> None:
        if part:
            self._line.append(part)
            self._size += len(part)
            if self._size > limits.UPSTREAM_LINE_BYTES:
                raise UpstreamFailed("The upstream sent an event that is too long.")

    def _end_line(self, found: list[str]) -> None:
        line = b"".join(self._line)
        self._line.clear()
        if self._is_first:
            line, self._is_first = line.removeprefix(BYTE_ORDER_MARK), False
        if not line:
            found += self._events()
            return
        name, _, value = line.partition(b":")
        if line.startswith(JSON_STARTS):
            value = line
        elif name != b"data":  # a comment, or a field without meaning here
            self._size -= len(line)
            return
        self._add(value)

    def _add(self, value: bytes) -> None:
        try:
            text = DATA.sub(b"", value, count=1).decode()
        except UnicodeDecodeError:
            raise UpstreamFailed("The upstream sent text that is not UTF-8.") from None
        if (word := text.strip()) in ENDS:
            text = END
        elif not word:
            return
        self._are_values = self._are_values and (text is END or text.startswith("{"))
        self._data.append(text)

    def _events(self) -> list[str]:
        """The data of one event, or of several if the upstream left out the empty lines between
        them."""
        lines, are_values = self._data, self._are_values
        self._data, self._size, self._are_values = [], 0, True
        return lines if are_values else ["\n".join(lines)]


BETWEEN = re.compile(r"[\s,]*(?:data:\s*)?")
"""Matches what may stand between two values of one event."""

PINGS = frozenset(("ping", "pong", "heartbeat", "keepalive", "keep-alive"))
"""Events that only keep the connection open."""

WRAPPERS = ("data", "response", "output", "result", "body")
"""Fields in which some servers wrap the answer."""


def values_of(text: str | bytes) -> Iterator[Any]:
    """Yields the values of a text; `END` stands for the end of the stream. Raises ValueError or
    RecursionError for a text that is not JSON, or has more values than a request may have."""
    raw = text.encode() if isinstance(text, str) else text
    check_bounds(raw)
    check_numbers(raw)
    try:
        found = decoded(raw)
    except (ValueError, RecursionError):
        words = raw.decode().strip()
        if words.lower() not in PINGS:
            yield from _concatenated(words)
        return
    if isinstance(found, list):
        yield from (_unwrapped(each) for each in found if each)
    elif found not in (None, ""):
        yield _unwrapped(found)


def _concatenated(text: str) -> Iterator[Any]:
    """Yields the values of a text that has several, for example one on each line."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        end = next((each for each in ENDS if text.startswith(each, at)), None)
        if end and at:
            yield END
            return
        _, stop = decoder.raw_decode(text, at)
        yield _unwrapped(lenient_json(text[at:stop]))
        found = BETWEEN.match(text, stop)
        at = found.end() if found else stop


def _unwrapped(value: Any) -> Any:
    if not isinstance(value, Mapping) or "choices" in value:
        return value
    for name in WRAPPERS:
        inner = value.get(name)
        if isinstance(inner, Mapping) and "choices" in inner:
            return {"usage": value.get("usage"), **inner}
    return value


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
