"""The MCP servers of one response, and the calls of their tools."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_server.mcp.errors import McpError
from mlx_server.mcp.limits import McpLimits
from mlx_server.mcp.texts import cut

if TYPE_CHECKING:
    from mlx_server.mcp.server import McpConnection


class Toolset:
    def __init__(self, servers: "Sequence[McpConnection]", limits: McpLimits) -> None:
        self.servers = servers
        self._by_label = {server.requested.label: server for server in servers}
        self._call_slots = asyncio.Semaphore(limits.parallel_calls)
        self._bytes_left = limits.all_result_bytes

    def has(self, server: str, tool: str) -> bool:
        found = self._by_label.get(server)
        return found is not None and tool in found.listing.tools

    async def call(self, server: str, tool: str, arguments: str) -> str:
        """Calls a server's tool, and returns its result as text. Raises McpError."""
        if not self.has(server, tool):
            raise McpError("There is no such tool.")
        async with self._call_slots:
            text = await self._by_label[server].call(tool, arguments)
        text = cut(text, max(0, self._bytes_left))
        self._bytes_left -= len(text.encode("utf-8", "replace"))
        return text
