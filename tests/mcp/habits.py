"""Servers over stdio that have a bad habit."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mlx_server.mcp import Connector, Connectors, McpError, Toolset
from mlx_server.requests import McpServer
from tests.mcp.playing import all_gone, lowered

HOSTILE = str(Path(__file__).with_name("hostile.py"))


@asynccontextmanager
async def opened(*habits: str, file: Path | None = None) -> AsyncIterator[Toolset]:
    connectors = Connectors(
        {
            habit: Connector(
                command=(sys.executable, HOSTILE, habit, *([str(file)] if file else []))
            )
            for habit in habits
        }
    )
    servers = [McpServer(habit, connector=habit) for habit in habits]
    with lowered(MCP_MESSAGES=1000):
        async with connectors.open(servers) as toolset:
            yield toolset
        await all_gone()


async def outcome(toolset: Toolset, habit: str) -> str:
    try:
        return (await toolset.call(habit, "look", "{}")).text
    except McpError as error:
        return f"error: {error}"


def listed(toolset: Toolset) -> tuple[list[str], str | None]:
    (server,) = toolset.servers
    return list(server.listing.tools), server.listing.error
