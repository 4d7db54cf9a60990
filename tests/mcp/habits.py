"""Servers over stdio that have a bad habit."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mlx_server.mcp import Connector, Connectors, McpError, McpLimits, Toolset
from mlx_server.requests import McpServer
from tests.mcp.playing import all_gone

HOSTILE = str(Path(__file__).with_name("hostile.py"))
LIMITS = McpLimits(open_seconds=10, call_seconds=10)
HASTY = McpLimits(open_seconds=0.5, call_seconds=0.5)


@asynccontextmanager
async def opened(
    *habits: str, file: Path | None = None, limits: McpLimits = LIMITS
) -> AsyncIterator[Toolset]:
    connectors = Connectors(
        {
            habit: Connector(
                command=(sys.executable, HOSTILE, habit, *([str(file)] if file else []))
            )
            for habit in habits
        },
        limits=limits,
    )
    servers = [McpServer(habit, connector=habit) for habit in habits]
    async with connectors.open(servers) as toolset:
        yield toolset
    await all_gone()


async def outcome(toolset: Toolset, habit: str) -> str:
    try:
        return await toolset.call(habit, "look", "{}")
    except McpError as error:
        return f"error: {error}"


def listed(toolset: Toolset) -> tuple[list[str], str | None]:
    (server,) = toolset.servers
    return list(server.listing.tools), server.listing.error
