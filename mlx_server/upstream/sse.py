"""Parses server-sent events of an upstream, even if they break the format."""

import re

from mlx_server import limits
from mlx_server.errors import UpstreamFailed

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

END = "[DONE]"

ENDS = (END, "[done]", "DONE", f'"{END}"')
"""The spellings of the event that ends a stream."""

JSON_STARTS = (b"{", b"}", b"[", b"]", b'"', b",", b" ", b"\t")
"""The beginnings of lines that are taken for JSON that an upstream sent without `data:`."""

BREAK = re.compile(rb"\r\n?|\n")

DATA = re.compile(rb"(?: ?data:)*+ ?")
"""Matches what precedes a value. Some proxies repeat the name of the field."""


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
