"""Failures of MCP servers. Their messages are shown to the model and to people."""


class McpError(Exception):
    """A failure of one server, which does not fail the request."""


class ToolFailed(McpError):
    """The server ran the tool, which reported an error."""


class ConnectionLost(McpError):
    """The connection can't be used any more."""


def cause(error: BaseException) -> BaseException:
    """The first leaf of nested exception groups: the SDK's task groups wrap every error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
