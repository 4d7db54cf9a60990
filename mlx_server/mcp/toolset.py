"""The servers of one response, and calls of their tools."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_server.mcp.errors import McpError

if TYPE_CHECKING:
    from mlx_server.mcp.server import Server


class Toolset:
    def __init__(self, servers: "Sequence[Server]", parallel_calls: int) -> None:
        self.servers = servers
        self._by_label = {server.asked.label: server for server in servers}
        self._places = asyncio.Semaphore(parallel_calls)

    def has(self, server: str, tool: str) -> bool:
        found = self._by_label.get(server)
        return found is not None and tool in found.listing.tools

    async def call(self, server: str, tool: str, arguments: str) -> str:
        """The result as text. Raises McpError."""
        if not self.has(server, tool):
            raise McpError("There is no such tool.")
        async with self._places:
            return await self._by_label[server].call(tool, arguments)
