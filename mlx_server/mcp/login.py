"""Logs a connector's owner in, by OAuth's authorization code with PKCE and the SDK's client."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.utils import union_scopes
from mcp.shared.auth import (
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
    ProtectedResourceMetadata,
)

from mlx_server import __version__
from mlx_server.mcp import login_file
from mlx_server.mcp.addresses import is_loopback
from mlx_server.mcp.callback import Callback, LoginFailed, callback
from mlx_server.mcp.connectors import StoredLogin
from mlx_server.mcp.http import http_transport
from mlx_server.mcp.limits import McpLimits
from mlx_server.mcp.login_file import Json, Login
from mlx_server.mcp.oauth import tokens_of
from mlx_server.mcp.session import Session

Show = Callable[[str], object]
"""Shows the owner the URL of the authorization server's page."""


@dataclass(frozen=True, slots=True)
class LoginClient:
    """The client's registration with the authorization server. Without an id, a new client is
    registered."""

    id: str | None = None
    secret: str | None = field(default=None, repr=False)
    issuer: str | None = None
    port: int = 0
    """The local port to which the browser is redirected; 0 means any free one."""


class _NoStorage:
    """Token storage that is always empty, since a login replaces all earlier tokens."""

    async def get_tokens(self) -> OAuthToken | None:
        return None

    async def set_tokens(self, tokens: OAuthToken) -> None: ...

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return None

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None: ...


class LoginProvider(OAuthClientProvider):
    """Requests the scopes that the server requires, and any that it has missed since the last
    login."""

    def __init__(
        self, url: str, client: LoginClient, back: Callback, show: Show, wanted: str | None
    ) -> None:
        self._client, self._back, self._show, self._wanted = client, back, show, wanted
        super().__init__(url, _metadata(back.url), _NoStorage(), self._open, back.result)

    async def _initialize(self) -> None:
        await super()._initialize()
        if self._client.id:
            method = "client_secret_basic" if self._client.secret else "none"
            self.context.client_info = OAuthClientInformationFull.model_validate(
                {
                    "client_id": self._client.id,
                    "client_secret": self._client.secret,
                    "token_endpoint_auth_method": method,
                    "issuer": self._client.issuer,
                }
            )

    async def _perform_authorization_code_grant(self) -> tuple[str, str]:
        metadata = self.context.client_metadata
        metadata.scope = union_scopes(metadata.scope, self._wanted)
        return await super()._perform_authorization_code_grant()

    async def _open(self, page: str) -> None:
        parts = urlsplit(page)
        if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
            raise LoginFailed("The authorization server's page is not https, so it is not shown.")
        (state,) = parse_qs(parts.query)["state"]
        self._back.expect(state)
        await asyncio.to_thread(self._show, page)


def _metadata(redirect: str) -> OAuthClientMetadata:
    return OAuthClientMetadata.model_validate(
        {
            "client_name": "mlx-server",
            "software_id": "mlx-server",
            "software_version": __version__,
            "redirect_uris": [redirect],
        }
    )


async def log_in(
    url: str, kept: StoredLogin, client: LoginClient, show: Show, *, allow_private: bool
) -> int:
    """Logs the owner in and writes the tokens to the file. Returns the number of tools that the
    server then offers.

    Raises LoginFailed.
    """
    async with callback(client.port) as back:
        provider = LoginProvider(url, client, back, show, await _wanted_scope(kept))
        try:
            tools = await _tools(url, provider, allow_private=allow_private)
        except LoginFailed:
            raise
        except Exception as error:
            raise LoginFailed(f"The login has failed: {error}") from None
    if provider.context.current_tokens is None:
        raise LoginFailed("The server asks for no login.")
    await asyncio.to_thread(login_file.write, kept.file, _login(url, provider))
    return tools


async def _tools(url: str, provider: OAuthClientProvider, *, allow_private: bool) -> int:
    def connect() -> Any:
        return http_transport(url, {}, McpLimits(), allow_private=allow_private, oauth=provider)

    session = Session(connect)
    try:
        client = await session.client()
        return len((await client.list_tools()).tools)
    finally:
        session.stop()
        await asyncio.wait([session.task])


async def _wanted_scope(kept: StoredLogin) -> str | None:
    try:
        before = await asyncio.to_thread(login_file.read, kept.file)
    except login_file.LoginUnusable:
        return None
    return before.wanted_scope if before else None


def _login(url: str, provider: OAuthClientProvider) -> Login:
    context = provider.context
    assert context.client_info
    return Login(
        url=url,
        client=context.client_info.model_dump(mode="json", exclude_none=True),
        authorization_server=_json(context.oauth_metadata),
        resource=_json(context.protected_resource_metadata),
        **tokens_of(provider),
    )


def _json(found: OAuthMetadata | ProtectedResourceMetadata | None) -> Json | None:
    return None if found is None else found.model_dump(mode="json", exclude_none=True)
