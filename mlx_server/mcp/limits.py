"""What MCP servers may send, and the errors when they fail, whose messages are shown to the model
and to the client."""

import re
from pathlib import PurePath

from mlx_server import limits


class McpError(Exception):
    """A failure of one server. It does not fail the request."""

    @property
    def kind(self) -> str:
        """The kind of error for the log. Unlike the message, it quotes neither the server nor the
        client."""
        return type(self).__name__


class ToolFailed(McpError):
    """The tool reported an error."""


class McpRefused(McpError):
    """The server responded with an HTTP error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def kind(self) -> str:
        return f"HTTP {self.status}"


class ConnectionLost(McpError):
    """The connection broke, or was closed since the server broke the protocol or a limit."""


class NoProgram(McpError):
    """The connector's program is not on this machine. Clients see its name, and no path."""

    def __init__(self, command: str) -> None:
        name = PurePath(command).name[:100]
        super().__init__(
            f"There is no program {name!r}: install it, or correct `command` in models.yaml."
        )


def cause(error: BaseException) -> BaseException:
    """The first error within nested exception groups, in which the SDK's task groups wrap every
    error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def cut(text: str, longest: int) -> str:
    """Truncates the text to `longest` bytes of UTF-8 and appends a note with its full size."""
    data = text.encode("utf-8", "replace")
    if len(data) <= longest:
        return text
    return data[:longest].decode("utf-8", "ignore") + f"\n[cut here; it has {len(data)} bytes]"


END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class Meter:
    def __init__(self, limit: int, unit: str = "bytes") -> None:
        self._limit, self._unit = limit, unit
        self._remaining = limit

    def count(self, size: int) -> None:
        """Counts what was received. Raises ConnectionLost if it is more than the limit."""
        self._remaining -= size
        if self._remaining < 0:
            raise ConnectionLost(f"The server sent more than {self._limit} {self._unit}.")


def messages_meter() -> Meter:
    """Counts a session's messages. For each that asks something the SDK starts a task, which waits
    until the server reads the answer."""
    return Meter(limits.MCP_MESSAGES, "messages")


class ValueMeter:
    """Bounds the values of a message before it is parsed, since a parser holds the interpreter."""

    def __init__(self, events: Meter | None = None) -> None:
        """events: counts server-sent events, each of which is a message; None for one message."""
        self._events = events
        self._brackets = self._signs = 0

    def count(self, chunk: bytes) -> None:
        """Counts a part of a message. Raises ConnectionLost if the message has too many values."""
        *ended, last = END_OF_EVENT.split(chunk) if self._events else [chunk]
        if self._events:
            self._events.count(len(ended))
        for event in ended:
            self._add(event)
            self._brackets = self._signs = 0
        self._add(last)

    def _add(self, part: bytes) -> None:
        self._brackets += part.count(b"[") + part.count(b"{")
        self._signs += part.count(b'"') + part.count(b",")
        most = limits.MCP_MESSAGE_BRACKETS
        if self._brackets > most or self._signs > 4 * most:
            raise ConnectionLost(f"The server sent a message of more than {most} values.")
