"""Sessions with MCP servers, over the official SDK. Whatever a server does, it costs the request
that names it a failed listing or a failed call, and nobody else anything."""

from mlx_server.mcp.connectors import Connector, Connectors
from mlx_server.mcp.errors import McpError
from mlx_server.mcp.limits import McpLimits
from mlx_server.mcp.toolset import Toolset

__all__ = ["Connector", "Connectors", "McpError", "McpLimits", "Toolset"]
