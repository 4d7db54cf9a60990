"""What goes wrong with an MCP server. The messages are for the model and for people."""


class McpError(Exception):
    """It concerns one server, and is no error of the request."""


class ConnectionLost(McpError):
    """The connection is of no more use."""


def cause(error: BaseException) -> BaseException:
    """The first one in groups of them: the SDK's task groups wrap whatever comes."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
