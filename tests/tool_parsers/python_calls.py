"""Tools that are called as Python."""

from mlx_server.messages import Tool

TOOLS = [
    Tool("f", None, {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}),
    Tool("g"),
]
