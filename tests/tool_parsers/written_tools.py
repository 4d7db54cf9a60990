"""Tools that write, and one that needs nothing."""

from mlx_server.messages import Tool

TOOLS = (
    Tool("write", None, {"properties": {"path": {"type": "string"}, "count": {"type": "integer"}}}),
    Tool("now"),
)
