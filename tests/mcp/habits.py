"""Servers over stdio that have a bad habit."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mlx_server.mcp import Connector, Connectors, Toolset
from mlx_server.requests import McpServer
from tests.mcp.playing import all_gone, lowered

HOSTILE = str(Path(__file__).with_name("hostile.py"))


def connectors(*habits: str, file: Path | None = None) -> Connectors:
    more = [str(file)] if file else []
    commands = {each: Connector(command=(sys.executable, HOSTILE, each, *more)) for each in habits}
    return Connectors(commands, allow_private_urls=True)


def named(*names: str) -> list[McpServer]:
    return [McpServer(name, connector=name) for name in names]


@asynccontextmanager
async def opened(*habits: str, file: Path | None = None) -> AsyncIterator[Toolset]:
    with lowered(MCP_MESSAGES=1000):
        async with connectors(*habits, file=file).open(named(*habits)) as toolset:
            yield toolset
        await all_gone()
