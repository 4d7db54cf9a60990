"""Sessions with MCP servers, by the official SDK.

Whatever a server does, only the tool list or the calls of the request that names it can fail; other
requests are not affected.
"""

from mlx_server.mcp.connectors import ClientCredentials, Connector, Connectors, StoredLogin, Toolset
from mlx_server.mcp.limits import McpError

__all__ = ["ClientCredentials", "Connector", "Connectors", "McpError", "StoredLogin", "Toolset"]
