"""The MCP servers that requests may name, and all open sessions with them."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from mlx_server import limits
from mlx_server.errors import BadRequest, Overloaded
from mlx_server.mcp.limits import McpError
from mlx_server.requests import McpServer
from mlx_server.system.shared_budget import SharedBudget

if TYPE_CHECKING:
    import httpx2

    from mlx_server.mcp.server import Connect, McpConnection, Session, ToolResult

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
HEADER_VALUE = re.compile(r"[\t -~]{0,8192}")
TRANSPORT_HEADERS = re.compile(
    r"host|connection|upgrade|te|trailer|transfer-encoding|content-.*|accept.*|proxy-.*|mcp-.*",
    re.IGNORECASE,
)
"""Matches headers that a request can't set since the transport sets them."""


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """A client's registration at the authorization server `issuer`, as its owner knows it."""

    issuer: str | None
    client_id: str
    client_secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class StoredLogin:
    """A login of the connector's owner, whose tokens are in a file."""

    name: str
    file: Path

    @classmethod
    def in_folder(cls, data_dir: Path, name: str) -> "StoredLogin":
        """The connector's name is quoted, since it may have characters that a file's can't have."""
        return cls(name, data_dir / "logins" / f"{quote(name, safe='')}.json")

    def forget(self) -> bool:
        """Removes the file. Returns whether there was one."""
        was_there = self.file.exists()
        self.file.unlink(missing_ok=True)
        return was_there


@dataclass(frozen=True, slots=True)
class Connector:
    """An MCP server from models.yaml: a URL, or a command that starts it."""

    url: str | None = None
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    allow_private: bool = False
    oauth: ClientCredentials | StoredLogin | None = None


class Toolset:
    def __init__(self, servers: Sequence["McpConnection"]) -> None:
        self.servers = servers
        self._by_label = {server.requested.label: server for server in servers}
        self._call_slots = asyncio.Semaphore(limits.MCP_PARALLEL_CALLS)
        self._bytes_left = limits.MCP_ALL_RESULT_BYTES

    def has(self, server: str, tool: str) -> bool:
        connection = self._by_label.get(server)
        return connection is not None and tool in connection.listing.tools

    async def call(self, server: str, tool: str, arguments: str) -> "ToolResult":
        """Calls a server's tool. Raises McpError."""
        if not self.has(server, tool):
            raise McpError("There is no such tool.")
        async with self._call_slots:
            result = await self._by_label[server].call(tool, arguments)
        result = result.cut(max(0, self._bytes_left))
        self._bytes_left -= result.nbytes
        return result


class Connectors:
    def __init__(
        self, configured: Mapping[str, Connector] | None = None, *, allow_private_urls: bool = False
    ) -> None:
        self._configured = configured or {}
        self._allow_private_urls = allow_private_urls
        self._places = asyncio.Semaphore(limits.MCP_RESPONSES)
        self._processes = SharedBudget(limits.MCP_PROCESSES)
        self._http_sessions = SharedBudget(limits.MCP_SESSIONS)
        self._sessions: set[Session] = set()
        self._authorizations: dict[str, httpx2.Auth] = {}
        """For all requests that name a connector, since a refresh token may be usable only once."""

    @property
    def names(self) -> list[str]:
        """The names of the connectors in models.yaml."""
        return list(self._configured)

    @asynccontextmanager
    async def open(self, requested: Sequence[McpServer]) -> AsyncIterator[Toolset]:
        """Connects to the servers until the block is left. A server that fails has no tools.

        Raises BadRequest for invalid servers, and Overloaded if too many are in use.
        """
        self._check(requested)
        # the SDK takes most of a second to import, so it is imported when it is first needed
        for part in ("oauth", "server", "stdio"):
            await asyncio.to_thread(import_module, f"mlx_server.mcp.{part}")
        from mlx_server.mcp.server import McpConnection, bound

        servers = [
            McpConnection(each, self._connection(each), self._register) for each in requested
        ]
        if self._places.locked():
            raise Overloaded("Too many responses use MCP servers. Try again in a moment.")
        async with self._places, self._room_for(servers):
            try:
                await asyncio.gather(*(server.open() for server in servers))
                bound([server.listing for server in servers])
                yield Toolset(servers)
            finally:
                for server in servers:
                    server.stop()

    @asynccontextmanager
    async def _room_for(self, servers: Sequence["McpConnection"]) -> AsyncIterator[None]:
        """Takes a unit of capacity for each server, and frees it when the server is closed, which
        may be after the block."""
        places = [self._places_for(server.requested) for server in servers]
        processes = places.count(self._processes)
        await _take(self._processes, processes, "processes for MCP servers")
        try:
            await _take(self._http_sessions, len(places) - processes, "connections to MCP servers")
        except BaseException:
            self._processes.give_back(processes)
            raise
        try:
            yield
        finally:
            for server, place in zip(servers, places, strict=True):
                server.on_closed(partial(place.give_back, 1))

    def _places_for(self, server: McpServer) -> SharedBudget:
        connector = self._configured.get(server.connector or "")
        is_process = connector is not None and connector.url is None
        return self._processes if is_process else self._http_sessions

    async def stop(self) -> None:
        """Ends all sessions, and waits until every server is closed."""
        while self._sessions:
            for session in self._sessions:
                session.stop()
            await asyncio.wait([session.task for session in self._sessions])

    def _register(self, session: "Session") -> None:
        self._sessions.add(session)
        session.task.add_done_callback(lambda _: self._sessions.discard(session))

    def _check(self, servers: Sequence[McpServer]) -> None:
        if len(servers) > limits.MCP_SERVERS:
            raise BadRequest(
                f"The request has {len(servers)} MCP servers; the limit is {limits.MCP_SERVERS}. "
                "Send fewer.",
                param=servers[-1].param,
            )
        connectors: dict[str, str] = {}
        for server in servers:
            if server.connector is not None:
                other = connectors.setdefault(server.connector, server.label)
                if other != server.label:
                    raise _request_error(
                        server,
                        f"uses the connector {server.connector[:64]!r}, which {other[:64]!r} uses "
                        "already; use each connector once",
                    )

    def _connection(self, server: McpServer) -> "Connect":
        from mlx_server.mcp.http import http_transport
        from mlx_server.mcp.oauth import authorization
        from mlx_server.mcp.stdio import stdio_transport

        headers = dict(_headers(server))
        if server.url is not None:
            url = _checked_url(server, server.url)
            private = self._allow_private_urls
            return partial(http_transport, url, headers, allow_private=private)
        connector = self._configured.get(server.connector or "")
        if connector is None:
            known = ", ".join(self._configured) or "none"
            raise _request_error(server, f"uses an unknown connector; models.yaml has: {known}")
        if connector.url is None:
            if headers:
                raise _request_error(server, "takes no headers because it is not reached by HTTP")
            return partial(stdio_transport, connector.command, connector.env)
        owners = {name.lower(): value for name, value in connector.headers.items()}
        private = connector.allow_private or self._allow_private_urls
        auth = self._authorizations.get(server.connector or "")
        if connector.oauth:
            headers.pop("authorization", None)
            auth = auth or authorization(connector.url, connector.oauth)
            self._authorizations[server.connector or ""] = auth
        return partial(
            http_transport, connector.url, {**headers, **owners}, allow_private=private, auth=auth
        )


async def _take(budget: SharedBudget, count: int, resource: str) -> None:
    """Takes `count` units together. Raises Overloaded if they are not free in time."""
    if not count:  # those that wait for some are not before it
        return
    taken = budget.reserve(count)
    try:
        async with asyncio.timeout(limits.MCP_WAIT_SECONDS):
            await taken
    except BaseException as error:
        is_taken = taken.done() and not taken.cancelled()
        budget.give_back(count if is_taken else 0)  # those after it are served
        if isinstance(error, TimeoutError):
            raise Overloaded(
                f"Other requests use all {budget.most} {resource}. Try again in a moment."
            ) from None
        raise


def _headers(server: McpServer) -> Iterable[tuple[str, str]]:
    if server.authorization is not None:
        yield "authorization", f"Bearer {_header_value(server, server.authorization)}"
    for name, value in server.headers.items():
        if not HEADER_NAME.fullmatch(name) or TRANSPORT_HEADERS.fullmatch(name):
            raise _request_error(server, f"can't have the header {name[:64]!r}")
        yield name.lower(), _header_value(server, value)


def _header_value(server: McpServer, value: str) -> str:
    if not HEADER_VALUE.fullmatch(value):
        raise _request_error(server, "has a header that is too long or not printable ASCII")
    return value


def _checked_url(server: McpServer, url: str) -> str:
    """Checks the URL's syntax. The transport checks its addresses when it connects."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or len(url) > limits.MCP_URL_CHARACTERS or not url.isprintable() or " " in url:
        raise _request_error(server, "needs an http or https URL")
    if parts.username is not None:
        raise _request_error(
            server, "has a URL with a user name; use `authorization` or `headers` instead"
        )
    return url


def _request_error(server: McpServer, what: str) -> BadRequest:
    return BadRequest(f"The MCP server {server.label[:64]!r} {what}.", param=server.param)
