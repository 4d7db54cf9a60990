"""A server whose owner logs in, and what it does with the login that is kept."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mlx_server.mcp import ClientCredentials, Connector, StoredLogin
from mlx_server.mcp.oauth import Show, log_in
from mlx_server.requests import McpServer
from tests.mcp.authority import Authority, visit
from tests.mcp.playing import all_gone, served
from tests.mcp.wild import listed, opened, outcome

WIKI = McpServer("wild", connector="wiki")


@asynccontextmanager
async def running() -> AsyncIterator[Authority]:
    server = Authority()
    async with served(server) as url:
        server.url = url
        yield server
    await all_gone()


async def logged_in(
    server: Authority,
    kept: StoredLogin,
    show: Show = visit,
    client: ClientCredentials | None = None,
    port: int = 0,
) -> int:
    url = f"{server.url}/mcp"
    return await log_in(url, kept, client, show, port=port, allow_private=True)


def connector(server: Authority, kept: StoredLogin) -> Connector:
    return Connector(url=f"{server.url}/mcp", allow_private=True, oauth=kept)


async def said(server: Authority, kept: StoredLogin) -> str:
    """What a tool says, or why there is none."""
    async with opened(WIKI, wiki=connector(server, kept)) as toolset:
        tools, error = listed(toolset)
        return await outcome(toolset) if tools else error
