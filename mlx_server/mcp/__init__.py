"""Sessions with MCP servers, over the official SDK.

Whatever a server does, it can only fail the listing or a call of the request that names it; other
requests are not affected.
"""

from mlx_server.mcp.connectors import ClientCredentials, Connector, Connectors, KeptLogin
from mlx_server.mcp.errors import McpError
from mlx_server.mcp.limits import McpLimits
from mlx_server.mcp.toolset import Toolset

__all__ = [
    "ClientCredentials",
    "Connector",
    "Connectors",
    "KeptLogin",
    "McpError",
    "McpLimits",
    "Toolset",
]
