"""Failures of MCP servers. Their messages are shown to the model and to people."""


class McpError(Exception):
    """A failure of one server, which does not fail the request."""

    @property
    def kind(self) -> str:
        """The error's kind for the log: unlike the message, it quotes neither the server nor the
        client."""
        return type(self).__name__


class ToolFailed(McpError):
    """The server ran the tool, which reported an error."""


class McpRefused(McpError):
    """The server answered with an HTTP status that means an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def kind(self) -> str:
        return f"HTTP {self.status}"


class ConnectionLost(McpError):
    """The connection can't be used any more."""


def cause(error: BaseException) -> BaseException:
    """The first leaf of nested exception groups: the SDK's task groups wrap every error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
