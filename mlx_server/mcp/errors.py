"""Failures of MCP servers. Their messages are shown to the model and to the client."""


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
