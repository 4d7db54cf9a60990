"""Connectors with OAuth's client credentials."""

import base64
import json
from typing import Any
from urllib.parse import parse_qs

import pytest

from mlx_server.mcp import ClientCredentials, Connector, Connectors
from mlx_server.requests import McpServer
from tests.mcp.playing import served
from tests.mcp.wild import JSON, Send, Wild, answered, listed, opened, outcome, quiet

pytestmark = pytest.mark.anyio

CHALLENGE = b"www-authenticate", b'Bearer error="invalid_token"'


class Listening(Wild):
    """A server that notes which tokens it gets."""

    def __init__(self) -> None:
        super().__init__(quiet)
        self.tokens: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        heads = {name.decode(): value.decode() for name, value in scope.get("headers", ())}
        self.tokens += [value for name, value in heads.items() if name == "authorization"]
        await super().__call__(scope, receive, send)


class Guarded(Wild):
    """A server that wants a token, which it gives out itself, a new one for each request."""

    def __init__(self, token_status: int = 200) -> None:
        super().__init__(quiet)
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        """The credentials and the fields of each request for a token."""
        self.url = ""
        self.issuer = ""
        self.valid = ""
        self._token_status = token_status

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        path = scope.get("path", "")
        heads = {name.decode(): value.decode() for name, value in scope.get("headers", ())}
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
        elif path == "/token":
            await self._token(heads, receive, send)
        elif path.startswith("/.well-known/oauth-authorization-server"):
            found = {"issuer": self.issuer, "authorization_endpoint": f"{self.url}/login"}
            found |= {"token_endpoint": f"{self.url}/token"}
            await answered(send, 200, json.dumps(found).encode(), JSON)
        elif path.startswith("/.well-known/oauth-protected-resource"):
            resource = {"resource": f"{self.url}/mcp", "authorization_servers": [self.issuer]}
            await answered(send, 200, json.dumps(resource).encode(), JSON)
        elif heads.get("authorization") != f"Bearer {self.valid}":
            await answered(send, 401, b'{"error": "invalid_token"}', JSON, CHALLENGE)
        else:
            await super().__call__(scope, receive, send)

    async def _token(self, heads: dict[str, str], receive: Any, send: Send) -> None:
        body = (await receive())["body"].decode()
        credentials = base64.b64decode(heads["authorization"].removeprefix("Basic ")).decode()
        self.asked.append((credentials, parse_qs(body)))
        self.valid = f"token-{len(self.asked)}"
        granted = {"access_token": self.valid, "token_type": "Bearer", "expires_in": 3600}
        refused = {"error": "invalid_client", "error_description": "Nobody knows you."}
        found = granted if self._token_status == 200 else refused
        await answered(send, self._token_status, json.dumps(found).encode(), JSON)


def connector(server: Guarded, url: str, secret: str, issuer: str | None = None) -> Connector:
    server.url, server.issuer = url, f"{url}/"
    credentials = ClientCredentials(issuer or server.issuer, "me", secret)
    return Connector(url=f"{url}/mcp", allow_private=True, oauth=credentials)


async def test_a_token_is_asked_for_once_and_again_when_it_is_refused() -> None:
    server = Guarded()
    async with served(server) as url:
        connectors = Connectors({"wiki": connector(server, url, "once")})
        wiki = McpServer("wild", connector="wiki", authorization="the client's")
        for _ in range(2):
            async with connectors.open([wiki]) as toolset:
                assert listed(toolset) == (1, "")
                assert await outcome(toolset) == "seen"
        assert len(server.asked) == 1
        server.valid = "revoked"
        async with connectors.open([wiki]) as toolset:
            assert await outcome(toolset) == "seen"
        await connectors.stop()
    assert [credentials for credentials, _ in server.asked] == ["me:once"] * 2
    _, fields = server.asked[0]
    assert fields["grant_type"] == ["client_credentials"]


async def test_a_token_is_sent_to_the_server_that_it_is_for() -> None:
    """Not to another one that the owner has registered with the same credentials."""
    guarded, other = Guarded(), Listening()
    async with served(guarded) as url, served(other) as elsewhere:
        made = connector(guarded, url, "shared")
        async with opened(McpServer("wild", connector="wiki"), wiki=made) as toolset:
            assert await outcome(toolset) == "seen"
        curious = Connector(url=f"{elsewhere}/mcp", allow_private=True, oauth=made.oauth)
        async with opened(McpServer("wild", connector="wiki"), wiki=curious) as toolset:
            assert await outcome(toolset) == "seen"
    assert len(guarded.asked) == 1
    assert other.tokens == []


async def test_no_other_server_gets_the_secret() -> None:
    server = Guarded()
    async with served(server) as url:
        made = connector(server, url, "mine", issuer="https://login.example.com")
        async with opened(McpServer("wild", connector="wiki"), wiki=made) as toolset:
            tools, error = listed(toolset)
    assert (tools, server.asked) == (0, [])
    assert error
