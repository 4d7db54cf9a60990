"""One MCP server of one response: its tools, and its session, which is reopened once if it is
lost."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx2
from mcp import MCPError, types
from mcp.client.auth import OAuthFlowError
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

from mlx_server import limits
from mlx_server.mcp.errors import ConnectionLost, McpError, McpRefused, ToolFailed, cause
from mlx_server.mcp.limits import McpLimits
from mlx_server.mcp.listing import Lister, Listing
from mlx_server.mcp.refusals import status_of
from mlx_server.mcp.results import text_of
from mlx_server.mcp.session import Session
from mlx_server.mcp.streams import Connect
from mlx_server.mcp.texts import cut
from mlx_server.requests import McpServer

log = logging.getLogger(__name__)

T = TypeVar("T")
Opened = Callable[[Session], None]


class McpConnection:
    def __init__(
        self, requested: McpServer, connect: Connect, limits: McpLimits, opened: Opened
    ) -> None:
        """opened: called with each new session, whose task may end later than the response."""
        self.requested = requested
        self.listing = Listing()
        self._connect = connect
        self._limits = limits
        self._opened = opened
        self._session: Session | None = None
        self._openings = 0
        self._last: asyncio.Task[None] | None = None
        """The task of the last session, for whose end the next session waits."""

    def needs_approval(self, tool: str) -> bool:
        listed = self.listing.tools[tool]
        hint = {"read_only": bool((listed.annotations or {}).get("readOnlyHint"))}
        always, never = self.requested.always_approve, self.requested.never_approve
        return always.holds(tool, **hint) or not never.holds(tool, **hint)

    async def open(self) -> None:
        """Opens the session and lists the server's tools. A failure is recorded in `listing`."""
        try:
            self.listing = await self._within(self._limits.open_seconds, self._list)
        except McpError as error:
            self.listing = Listing(failure=str(error))
            log.warning("an MCP server has no tools (%s)", error.kind)
            self.stop()

    def stop(self) -> None:
        if self._session:
            self._session.stop()
        self._session = None

    def on_closed(self, then: Callable[[], None]) -> None:
        """Calls `then` when the server's process or connection has ended, or now if it has."""
        if self._last is None or self._last.done():
            then()
        else:
            self._last.add_done_callback(lambda _: then())

    async def call(self, tool: str, arguments: str) -> str:
        """Calls the tool, and returns its result as text. Raises McpError."""
        given = _arguments_object(arguments)

        async def call(session: Session) -> types.CallToolResult:
            # the SDK's `call_tool` would validate the result by a schema of the untrusted server
            request = types.CallToolRequest(
                params=types.CallToolRequestParams(name=tool, arguments=given)
            )
            client = await session.client()
            return await client.session.send_request(request, types.CallToolResult)

        result = await self._within(self._limits.call_seconds, call)
        text = text_of(result, self._limits.result_bytes)
        if result.is_error:
            raise ToolFailed(text or "The tool failed without a message.")
        return text

    async def _list(self, session: Session) -> Listing:
        client = await session.client()
        lister = Lister(self.requested, self._limits)
        cursor, cursors = None, set[str | None]()
        while cursor not in cursors and not lister.full:
            cursors.add(cursor)
            page = await client.list_tools(cursor=cursor)
            lister.add(page)
            cursor = page.next_cursor
            if cursor is None:
                break
        return lister.listing

    async def _within(self, seconds: float, send: Callable[[Session], Awaitable[T]]) -> T:
        session = self._open_session()
        try:
            async with asyncio.timeout(seconds):
                return await send(session)
        except TimeoutError:
            public: McpError = ConnectionLost(f"The server did not answer within {seconds:g} s.")
        except Exception as error:
            public = self._public_error(cause(error))
        if isinstance(public, ConnectionLost):
            if self._session is session:
                self._session = None
            failure = await session.failure()
            public = self._public_error(failure) if failure else public
        raise public from None

    def _open_session(self) -> Session:
        if self._session is None:
            if self._openings == limits.MCP_OPENINGS.value:
                raise ConnectionLost("The server's connection was lost twice.")
            self._openings += 1
            self._session = Session(self._connect, self._last)
            self._last = self._session.task
            self._opened(self._session)
        return self._session

    def _public_error(self, error: BaseException) -> McpError:
        match error:
            case McpError():
                return error
            case MCPError() if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                return ConnectionLost("The server closed the connection.")
            case MCPError():
                message = cut(error.message, self._limits.error_characters)
                status = status_of(error.data)
                return McpRefused(message, status) if status else McpError(message)
            case OAuthFlowError():
                said = f"The server gave no authorization: {error}"
                return McpError(cut(said, self._limits.error_characters))
            case httpx2.HTTPError() | OSError():
                return ConnectionLost(
                    cut(f"The server can't be reached: {error}", self._limits.error_characters)
                )
            case _:
                return McpError(f"The server did not follow the protocol ({type(error).__name__}).")


def _arguments_object(arguments: str) -> dict[str, Any]:
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise McpError("The arguments are not a JSON object.")
    return given
