"""Authorization of connectors by OAuth, with the SDK's own clients: by client credentials, or by
the login of their owner."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.auth.utils import extract_field_from_www_auth
from mcp.shared.auth import (
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
    ProtectedResourceMetadata,
)

from mlx_server.mcp import login_file
from mlx_server.mcp.connectors import ClientCredentials, KeptLogin
from mlx_server.mcp.errors import McpError
from mlx_server.mcp.login_file import Login
from mlx_server.mcp.texts import cut

SCOPE_CHARACTERS = 1000


class LoginNeeded(McpError):
    """The owner has to log in, which no request can do."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{why} Its owner runs `mlx-server connectors login {name}`.")


Authorization = ClientCredentials | KeptLogin | httpx2.Auth


def authorization(url: str, by: Authorization) -> httpx2.Auth:
    match by:
        case ClientCredentials():
            return _by_credentials(url, by)
        case KeptLogin():
            return LoggedIn(url, by)
    return by


# Client credentials


@dataclass
class RememberedToken:
    """The token of one connector, until the server ends: a new one costs only a request."""

    token: OAuthToken | None = field(default=None, repr=False)

    async def get_tokens(self) -> OAuthToken | None:
        return self.token

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.token = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return None  # the owner has registered the client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        pass


_tokens: dict[tuple[str, ClientCredentials], RememberedToken] = {}
"""The token of each connector of models.yaml, so no client can add to them. A token is for one
server: others that the owner has registered with the same credentials never get it."""


def _by_credentials(url: str, credentials: ClientCredentials) -> ClientCredentialsOAuthProvider:
    """Asks for a token when the server refuses a request without one, or with an old one."""
    return ClientCredentialsOAuthProvider(
        url,
        _tokens.setdefault((url, credentials), RememberedToken()),
        credentials.client_id,
        credentials.client_secret,
        issuer=credentials.issuer,
    )


# Logins


class LoggedIn(OAuthClientProvider):
    """Sends the tokens of a login and refreshes them, at the place that the login has found.

    The SDK's own flow would register a client and show a page to a person at the first refusal.
    """

    requires_response_body = False  # or events would arrive only once the last one is there

    def __init__(self, url: str, kept: KeptLogin) -> None:
        super().__init__(url, OAuthClientMetadata(redirect_uris=None), RememberedToken())
        self._kept = kept
        self._login: Login | None = None
        self._refreshing = _locks.setdefault(kept.file, asyncio.Lock())

    async def _auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        async with self._refreshing:
            await self._read()
            if not self.context.is_token_valid():
                await self._keep((yield await self._refresh_request()))
        self._add_auth_header(request)
        response = yield request
        if _lacks_scope(response):
            await self._remember_scope(response)
            raise LoginNeeded(self._kept.name, "The connector's login does not allow that.")
        if response.status_code != httpx2.codes.UNAUTHORIZED:
            return
        async with self._refreshing:
            refused = request.headers["authorization"]
            await self._read()
            self._add_auth_header(request)
            if request.headers["authorization"] == refused:  # no other connection has refreshed it
                await self._keep((yield await self._refresh_request()))
                self._add_auth_header(request)
        yield request

    async def _read(self) -> None:
        """Reads the file each time: the owner may have logged in, another connection refreshed."""
        found = await asyncio.to_thread(login_file.read, self._kept.file)
        if found is None or found.url != self.context.server_url or not found.tokens:
            raise LoginNeeded(self._kept.name, "The connector needs a login.")
        self._login = found
        context = self.context
        context.current_tokens = OAuthToken.model_validate(found.tokens)
        context.token_expiry_time = found.expires_at
        context.client_info = OAuthClientInformationFull.model_validate(found.client)
        if found.authorization_server:
            context.oauth_metadata = OAuthMetadata.model_validate(found.authorization_server)
        if found.resource:
            resource = ProtectedResourceMetadata.model_validate(found.resource)
            context.protected_resource_metadata = resource

    async def _refresh_request(self) -> httpx2.Request:
        if not self.context.can_refresh_token():
            raise self._expired()
        return await self._refresh_token()

    async def _keep(self, response: httpx2.Response) -> None:
        if not await self._handle_refresh_response(response):
            raise self._expired()
        assert self._login
        login = msgspec.structs.replace(self._login, **tokens_of(self))
        await asyncio.to_thread(login_file.write, self._kept.file, login)

    async def _remember_scope(self, response: httpx2.Response) -> None:
        assert self._login
        scope = extract_field_from_www_auth(response, "scope")
        if scope and scope != self._login.wanted_scope:
            login = msgspec.structs.replace(self._login, wanted_scope=cut(scope, SCOPE_CHARACTERS))
            await asyncio.to_thread(login_file.write, self._kept.file, login)

    def _expired(self) -> LoginNeeded:
        return LoginNeeded(self._kept.name, "The connector's login has ended.")


_locks: dict[Path, asyncio.Lock] = {}
"""A lock for each connector with a login: a refresh token may be good for a single use."""


def tokens_of(provider: OAuthClientProvider) -> Mapping[str, Any]:
    """The fields of a Login that a refresh changes."""
    tokens = provider.context.current_tokens
    assert tokens
    found = tokens.model_dump(mode="json", exclude_none=True)
    return {"tokens": found, "expires_at": provider.context.token_expiry_time}


def _lacks_scope(response: httpx2.Response) -> bool:
    if response.status_code != httpx2.codes.FORBIDDEN:
        return False
    return extract_field_from_www_auth(response, "error") == "insufficient_scope"
