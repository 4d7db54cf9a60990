"""The program that MCP's conformance suite runs as the client: our connectors and their owner.

The suite appends the server's URL, and names the scenario in the environment.
"""

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_server.mcp import ClientCredentials, Connector, Connectors, McpError, StoredLogin, Toolset
from mlx_server.mcp.oauth import log_in
from mlx_server.requests import McpServer

LABEL = "suite"
LOGIN = "connectors login"
LOGINS = 3
"""The most times that the owner follows the advice to log in."""
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Json = dict[str, Any]


def visit(page: str) -> None:
    with NO_PROXY.open(page, timeout=10) as response:
        response.read()


class Owner:
    """The user who owns the connectors, and logs in where one of them asks for it."""

    def __init__(self, url: str, kept: StoredLogin, client: ClientCredentials | None) -> None:
        self._url, self._kept, self._client = url, kept, client
        self._left = LOGINS

    async def follows(self, advice: str) -> bool:
        if LOGIN not in advice or not self._left:
            return False
        self._left -= 1
        await log_in(self._url, self._kept, self._client, visit, allow_private=True)
        return True


async def play(url: str, scenario: str, context: Json, data: Path) -> None:
    kept = StoredLogin.in_folder(data, LABEL)
    id, secret = context.get("client_id"), context.get("client_secret")
    owner = Owner(url, kept, ClientCredentials(None, id, secret) if id else None)
    oauth: ClientCredentials | StoredLogin | None = None
    if scenario.startswith("auth/client-credentials"):
        issuer = await asyncio.to_thread(issuer_of, url)
        oauth = ClientCredentials(issuer, context["client_id"], context["client_secret"])
    elif scenario.startswith("auth/"):
        oauth = kept
    connectors = Connectors({LABEL: Connector(url=url, allow_private=True, oauth=oauth)})
    try:
        while advice := await called(connectors):
            if not await owner.follows(advice):
                sys.exit(advice)
    finally:
        await connectors.stop()


async def called(connectors: Connectors) -> str | None:
    """Calls every tool, as a response would. Returns the first error."""
    async with connectors.open([McpServer(LABEL, connector=LABEL)]) as toolset:
        (server,) = toolset.servers
        if server.listing.error:
            return server.listing.error
        for listed in server.listing.tools.values():
            if problem := await _call(toolset, listed.name, listed.schema):
                return problem
    return None


async def _call(toolset: Toolset, name: str, schema: Mapping[str, Any]) -> str | None:
    needed = dict.fromkeys(schema.get("required", ()), 1)
    try:
        sys.stdout.write((await toolset.call(LABEL, name, json.dumps(needed))).text)
    except McpError as error:
        return str(error)
    return None


def issuer_of(url: str) -> str:
    """Returns the issuer that the owner would know from the server's documentation."""
    host, _, path = url.removeprefix("http://").partition("/")
    with NO_PROXY.open(f"http://{host}/.well-known/oauth-protected-resource/{path}") as response:
        issuer: str = json.load(response)["authorization_servers"][0]
    return issuer


def main() -> None:
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    scenario = os.environ["MCP_CONFORMANCE_SCENARIO"]
    with TemporaryDirectory() as data:
        asyncio.run(play(sys.argv[-1], scenario, context, Path(data)))


if __name__ == "__main__":
    main()
