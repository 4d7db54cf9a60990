"""Messages of earlier turns."""

from mlx_server.messages import ToolCall


def call(id: str, name: str = "f", arguments: str = "{}") -> ToolCall:
    return ToolCall(id, name, arguments)
