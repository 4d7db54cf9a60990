"""OAuth for connectors, by the SDK's providers: with the credentials of a client, or with a login
of the connector's owner, whose tokens are in a file."""

import asyncio
import dataclasses
import hmac
import os
import stat
from collections.abc import AsyncGenerator, Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import msgspec
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.auth.utils import extract_field_from_www_auth, union_scopes
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken

from mlx_server import __version__
from mlx_server.mcp.connectors import ClientCredentials, StoredLogin
from mlx_server.mcp.http import http_transport
from mlx_server.mcp.limits import McpError, cut
from mlx_server.mcp.server import Session
from mlx_server.system.files import open_regular, own_path, replace_file
from mlx_server.system.listening_sockets import is_loopback

FILE_BYTES = 1 << 20
"""The most of a login's file that is read: one that is larger is damaged."""

SCOPE_CHARACTERS = 1000
ERROR_CHARACTERS = 300

HOST, PATH = "127.0.0.1", "/callback"
LOGIN_SECONDS = 600.0
"""How long a login waits for the owner to finish it in the browser."""

REQUEST_SECONDS = 10.0

Flow = AsyncGenerator[httpx2.Request, httpx2.Response]
Show = Callable[[str], object]
"""Shows the owner the URL of the authorization server's page."""


class LoginNeeded(McpError):
    """The connector's owner has to log in, which can't be done within a request."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{why} Its owner runs `mlx-server connectors login {name}`.")


class LoginFailed(McpError):
    """The login ended without tokens."""


# What the SDK stores


class TokenMemory:
    """Keeps what the SDK stores in memory: after a restart, a new token takes only one request."""

    def __init__(self) -> None:
        self.tokens: OAuthToken | None = None
        self.client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class SavedLogin(msgspec.Struct, frozen=True):
    url: str
    """The MCP server that the tokens are for."""
    tokens: dict[str, Any]
    client: dict[str, Any]
    """The registration with the authorization server, and which one that is."""


class LoginFile(TokenMemory):
    """A private file, which is replaced as a whole when there are new tokens. The tokens' scope
    also has what the server has required since: the next login requests all of it."""

    def __init__(self, path: Path, url: str) -> None:
        super().__init__()
        self._path = path
        self._url = url

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens
        await asyncio.to_thread(self._save)

    def load(self) -> None:
        """Reads the file. Without one, or with tokens for another server, there are no tokens.
        Raises McpError for a damaged file, or one that other users could read or write."""
        self.tokens = None
        try:
            login = msgspec.json.decode(self._content(), type=SavedLogin)
            if login.url == self._url:
                self.tokens = OAuthToken.model_validate(login.tokens)
                self.client = OAuthClientInformationFull.model_validate(login.client)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._unusable(f"can't be read: {error.strerror}.") from None
        except ValueError:
            raise self._unusable("is damaged: log in again.") from None

    def _save(self) -> None:
        login = SavedLogin(self._url, _json(self.tokens), _json(self.client))
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._path, msgspec.json.encode(login))

    def _content(self) -> bytes:
        with open_regular(own_path(self._path), is_own=True) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise self._unusable(
                    "is not private: other users may have read or written it. Log in again, which "
                    "replaces it."
                )
            return file.read(FILE_BYTES)

    def _unusable(self, why: str) -> McpError:
        return McpError(f"The login in {self._path.name} {why}")


def _json(record: OAuthToken | OAuthClientInformationFull | None) -> dict[str, Any]:
    assert record
    return record.model_dump(mode="json", exclude_none=True)


# While requests are served


def authorization(url: str, by: ClientCredentials | StoredLogin) -> OAuthClientProvider:
    """The provider of all connections to one server, so that each token is fetched once."""
    if isinstance(by, StoredLogin):
        return OwnersTokens(url, by)
    secret = by.client_secret or ""
    return ClientsTokens(url, TokenMemory(), by.client_id, secret, issuer=by.issuer)


class SharedProvider(OAuthClientProvider):
    """Sends a request at once if there is a valid token. The SDK holds a lock until the server has
    answered, which takes long where a tool does; here only requests that were refused need it."""

    async def _auth_flow(self, request: httpx2.Request) -> Flow:
        await self._prepare()
        if self.context.is_token_valid():
            self._add_auth_header(request)
            response = yield request
            if lacks_scope(response):
                await self._step_up(response)
            elif response.status_code != httpx2.codes.UNAUTHORIZED:
                return
        flow = super()._auth_flow(request)
        try:
            outgoing = await anext(flow)
            while True:
                response = yield outgoing
                outgoing = await flow.asend(response)
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()

    async def _prepare(self) -> None: ...

    async def _step_up(self, response: httpx2.Response) -> None: ...


class ClientsTokens(SharedProvider, ClientCredentialsOAuthProvider):
    """Requests a token after the server has refused a request without one, or with an old one."""


class OwnersTokens(SharedProvider):
    """Sends the tokens of a login and refreshes them, where the SDK would open a page."""

    def __init__(self, url: str, login: StoredLogin) -> None:
        self._name = login.name
        self._file = LoginFile(login.file, url)
        super().__init__(url, client_metadata(), self._file)

    async def _prepare(self) -> None:
        """Reads the login again, which the owner may have changed. Raises LoginNeeded if it has no
        tokens for this server."""
        async with self.context.lock:  # a refresh is writing what would be read
            await asyncio.to_thread(self._file.load)
            await self._initialize()
        if self.context.current_tokens is None:
            raise LoginNeeded(self._name, "The connector needs a login.")

    async def _step_up(self, response: httpx2.Response) -> None:
        async with self.context.lock:
            if tokens := self._file.tokens:
                scope = extract_field_from_www_auth(response, "scope")
                scopes = union_scopes(tokens.scope, scope and cut(scope, SCOPE_CHARACTERS))
                await self._file.set_tokens(tokens.model_copy(update={"scope": scopes}))
        raise LoginNeeded(self._name, "The connector's login does not allow that.")

    async def _perform_authorization(self) -> httpx2.Request:
        if not self.context.can_refresh_token():
            raise LoginNeeded(self._name, "The connector's login has ended.")
        return await self._refresh_token()

    async def _handle_token_response(self, response: httpx2.Response) -> None:
        if not await self._handle_refresh_response(response):
            raise LoginNeeded(self._name, "The connector's login has ended.")


def lacks_scope(response: httpx2.Response) -> bool:
    if response.status_code != httpx2.codes.FORBIDDEN:
        return False
    return extract_field_from_www_auth(response, "error") == "insufficient_scope"


def client_metadata(redirect: str | None = None) -> OAuthClientMetadata:
    return OAuthClientMetadata.model_validate(
        {
            "client_name": "mlx-server",
            "software_id": "mlx-server",
            "software_version": __version__,
            "redirect_uris": [redirect] if redirect else None,
        }
    )


# The owner's login


class LoginProvider(OAuthClientProvider):
    """Requests the scopes of the login before, and those that the server requires."""

    def __init__(
        self, url: str, file: LoginFile, scope: str | None, redirect: "Redirect", show: Show
    ) -> None:
        self._scope, self._redirect, self._show = scope, redirect, show
        metadata = client_metadata(redirect.url)
        super().__init__(url, metadata, file, self._open, redirect.result)

    async def _perform_authorization_code_grant(self) -> tuple[str, str]:
        context = self.context
        context.client_metadata.scope = union_scopes(context.client_metadata.scope, self._scope)
        if context.client_info and context.oauth_metadata and not context.client_info.issuer:
            # no other authorization server gets the refresh token
            context.client_info.issuer = str(context.oauth_metadata.issuer)
        return await super()._perform_authorization_code_grant()

    async def _open(self, page: str) -> None:
        parts = urlsplit(page)
        if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
            raise LoginFailed("The authorization server's page is not https, so it is not shown.")
        (self._redirect.state,) = parse_qs(parts.query)["state"]
        await asyncio.to_thread(self._show, page)


async def log_in(
    url: str,
    login: StoredLogin,
    client: ClientCredentials | None,
    show: Show,
    *,
    port: int = 0,
    allow_private: bool = False,
) -> int:
    """Logs the owner in and writes the tokens to the file. Returns the number of tools that the
    server then offers. Raises LoginFailed.

    client: its registration with the authorization server; None registers a new one.
    port: the local port to which the browser is redirected; 0 means any free one.
    """
    file = LoginFile(login.file, url)
    with suppress(McpError):
        await asyncio.to_thread(file.load)
    scope = file.tokens.scope if file.tokens else None
    file.tokens, file.client = None, registered(client) if client else None
    redirect = Redirect()
    with closing(await redirect.listen(port)):
        provider = LoginProvider(url, file, scope, redirect, show)
        session = Session(
            partial(http_transport, url, {}, allow_private=allow_private, auth=provider)
        )
        try:
            tools = (await (await session.client()).list_tools()).tools
        except LoginFailed:
            raise
        except Exception as error:
            raise LoginFailed(f"The login has failed: {error}") from None
        finally:
            session.stop()
            await asyncio.wait([session.task])
    if provider.context.current_tokens is None:
        raise LoginFailed("The server asks for no login.")
    return len(tools)


def registered(client: ClientCredentials) -> OAuthClientInformationFull:
    method = "client_secret_basic" if client.client_secret else "none"
    fields = dataclasses.asdict(client) | {"token_endpoint_auth_method": method}
    return OAuthClientInformationFull.model_validate(fields)


class Redirect:
    """Waits on this machine for the browser, which the authorization server redirects here with the
    `state` of the login; other requests are refused."""

    def __init__(self) -> None:
        self.url = self.state = ""
        self._fields: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    async def listen(self, port: int) -> asyncio.Server:
        """Listens on the port, or on any free one for 0. Raises LoginFailed if it is in use."""
        try:
            server = await asyncio.start_server(self._answer, HOST, port)
        except OSError as error:
            raise LoginFailed(f"The port {port} can't be listened on: {error.strerror}.") from None
        self.url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}{PATH}"
        return server

    async def result(self) -> AuthorizationCodeResult:
        """The authorization code of the redirect. Raises LoginFailed for an error, and if no
        redirect comes in time."""
        try:
            async with asyncio.timeout(LOGIN_SECONDS):
                fields = await self._fields
        except TimeoutError:
            raise LoginFailed(
                "The login was not finished in time. Run the command again."
            ) from None
        if error := fields.get("error"):
            text = " ".join(f"{error}: {fields.get('error_description', '')}".split())
            shown = cut("".join(filter(str.isprintable, text)).rstrip(" :"), ERROR_CHARACTERS)
            raise LoginFailed(f"The authorization server refused: {shown}.")
        if not fields.get("code"):
            raise LoginFailed("The authorization server sent neither a code nor an error.")
        return AuthorizationCodeResult(
            code=fields["code"], state=fields["state"], iss=fields.get("iss")
        )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, ValueError):  # ValueError: a line without end
            async with asyncio.timeout(REQUEST_SECONDS):
                request = (await reader.readline()).decode("latin-1")
                while (await reader.readline()).strip():  # the headers
                    pass
                if self._finish(request):
                    reply = "200 OK", "mlx-server has the answer. You can close this page."
                else:
                    reply = "400 Bad Request", "This is not the answer to a login that waits here."
                writer.write(PAGE.format(*reply).encode())
                await writer.drain()

    def _finish(self, request: str) -> bool:
        """Whether the request is the redirect of this login."""
        place, _, query = request.partition(" HTTP/")[0].partition("?")
        fields = {name: values[0] for name, values in parse_qs(query).items()}
        state, sent = self.state.encode(), fields.get("state", "").encode()
        if place != f"GET {PATH}" or not (state and hmac.compare_digest(sent, state)):
            return False
        if not self._fields.done():
            self._fields.set_result(fields)
        return True


PAGE = (
    "HTTP/1.1 {}\r\nContent-Type: text/plain; charset=utf-8\r\nReferrer-Policy: no-referrer\r\n"
    "Connection: close\r\n\r\n{}"
)
