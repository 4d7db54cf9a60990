"""Authorizes connectors by OAuth with the SDK's clients: by client credentials, or by the tokens of
their owner's login."""

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
from mlx_server.mcp.connectors import ClientCredentials, StoredLogin
from mlx_server.mcp.errors import McpError
from mlx_server.mcp.login_file import Login
from mlx_server.mcp.texts import cut

SCOPE_CHARACTERS = 1000


class LoginNeeded(McpError):
    """The connector's owner has to log in, which can't be done within a request."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{why} Its owner runs `mlx-server connectors login {name}`.")


Authorization = ClientCredentials | StoredLogin | httpx2.Auth


def authorization(url: str, by: Authorization) -> httpx2.Auth:
    match by:
        case ClientCredentials():
            return _by_credentials(url, by)
        case StoredLogin():
            return LoggedIn(url, by)
    return by


# Client credentials


@dataclass
class RememberedToken:
    """The token of one connector, in memory: after a restart, a new one takes only one request."""

    token: OAuthToken | None = field(default=None, repr=False)

    async def get_tokens(self) -> OAuthToken | None:
        return self.token

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.token = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return None  # the client was registered by the owner, not by the SDK

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        pass


_tokens: dict[tuple[str, ClientCredentials], RememberedToken] = {}
"""The token of each connector of models.yaml, to which clients can't add. It is only for one URL:
other servers with the same credentials never get it."""


def _by_credentials(url: str, credentials: ClientCredentials) -> ClientCredentialsOAuthProvider:
    """Requests a token after the server has refused a request without one, or with an old one."""
    return ClientCredentialsOAuthProvider(
        url,
        _tokens.setdefault((url, credentials), RememberedToken()),
        credentials.client_id,
        credentials.client_secret,
        issuer=credentials.issuer,
    )


# Logins


class LoggedIn(OAuthClientProvider):
    """Sends the tokens of a login, and refreshes them at the authorization server of the login.

    The SDK's own flow would register a client and open a page at the first refusal.
    """

    requires_response_body = False  # else an event stream would be read to its end first

    def __init__(self, url: str, kept: StoredLogin) -> None:
        super().__init__(url, OAuthClientMetadata(redirect_uris=None), RememberedToken())
        self._kept = kept
        self._login: Login | None = None
        self._refreshing = _locks.setdefault(kept.file, asyncio.Lock())

    async def _auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        async with self._refreshing:
            await self._load_login()
            if not self.context.is_token_valid():
                await self._store_tokens((yield await self._refresh_request()))
        self._add_auth_header(request)
        response = yield request
        if _lacks_scope(response):
            await self._remember_scope(response)
            raise LoginNeeded(self._kept.name, "The connector's login does not allow that.")
        if response.status_code != httpx2.codes.UNAUTHORIZED:
            return
        async with self._refreshing:
            refused = request.headers["authorization"]
            await self._load_login()
            self._add_auth_header(request)
            if request.headers["authorization"] == refused:  # not refreshed by another connection
                await self._store_tokens((yield await self._refresh_request()))
                self._add_auth_header(request)
        yield request

    async def _load_login(self) -> None:
        """Reads the login from its file, which the owner or another connection may have changed
        since the last request. Raises LoginNeeded if it has no tokens for this server."""
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

    async def _store_tokens(self, response: httpx2.Response) -> None:
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
"""A lock for each login, since its refresh token may be usable only once."""


def tokens_of(provider: OAuthClientProvider) -> Mapping[str, Any]:
    """The fields of `Login` that a refresh changes."""
    tokens = provider.context.current_tokens
    assert tokens
    found = tokens.model_dump(mode="json", exclude_none=True)
    return {"tokens": found, "expires_at": provider.context.token_expiry_time}


def _lacks_scope(response: httpx2.Response) -> bool:
    if response.status_code != httpx2.codes.FORBIDDEN:
        return False
    return extract_field_from_www_auth(response, "error") == "insufficient_scope"
