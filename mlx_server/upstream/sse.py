"""Parses server-sent events of an upstream, even if they break the format."""

from mlx_server import limits
from mlx_server.errors import UpstreamFailed

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

END = "[DONE]"

ENDS = (END, "[done]", "DONE", f'"{END}"')
"""The spellings of the event that ends a stream."""

JSON_STARTS = (b"{", b"}", b"[", b"]", b'"', b",", b" ", b"\t")
"""The beginnings of lines that are taken for JSON that an upstream sent without `data:`."""


class SseReader:
    """Turns chunks of bytes, however they are cut, into the `data` of events."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []
        self._size = self._searched = 0
        self._after_return = False
        self._is_first = True
        """Whether the next line is the first one, which may have a byte order mark."""

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that this chunk completes."""
        if self._after_return and chunk:  # the line feed belongs to the line break before it
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        self._rest += chunk
        found: list[str] = []
        while (line := self._line()) is not None:
            self._add(line, found)
        if len(self._rest) + self._size > limits.UPSTREAM_LINE_BYTES.value:
            raise UpstreamFailed("The upstream sent an event that is too long.")
        return found

    def finish(self) -> list[str]:
        """The data of the last event, if the stream ended without the empty line after it."""
        found: list[str] = []
        self._add(bytes(self._rest), found)
        self._rest.clear()
        self._add(b"", found)
        return found

    def _line(self) -> bytes | None:
        ends = [at for sign in (b"\n", b"\r") if (at := self._rest.find(sign, self._searched)) >= 0]
        if not ends:
            self._searched = len(self._rest)
            return None
        end = min(ends)
        line, size = bytes(self._rest[:end]), 1
        if self._rest[end : end + 1] == b"\r":
            self._after_return = end + 1 == len(self._rest)
            size += self._rest[end + 1 : end + 2] == b"\n"
        del self._rest[: end + size]
        self._searched = 0
        return line

    def _add(self, line: bytes, found: list[str]) -> None:
        if self._is_first:
            line, self._is_first = line.removeprefix(BYTE_ORDER_MARK), False
        if not line:
            found += _events(self._data)
            self._data, self._size = [], 0
            return
        name, _, value = line.partition(b":")
        if line.startswith(JSON_STARTS):
            value = line
        elif name != b"data":  # a comment, or a field without meaning here
            return
        while value.removeprefix(b" ").startswith(b"data:"):  # some proxies repeat it
            value = value.removeprefix(b" ").removeprefix(b"data:")
        try:
            self._data.append(value.removeprefix(b" ").decode())
        except UnicodeDecodeError:
            raise UpstreamFailed("The upstream sent text that is not UTF-8.") from None
        self._size += len(value)


def _events(lines: list[str]) -> list[str]:
    """The data of one event, or of several if the upstream left out the empty lines between
    them."""
    lines = [line for line in lines if line.strip()]
    if all(line.startswith("{") or line.strip() in ENDS for line in lines):
        return [END if line.strip() in ENDS else line for line in lines]
    return ["\n".join(lines)]
